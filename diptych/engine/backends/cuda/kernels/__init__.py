"""Triton kernels. Importing one imports triton, and compiles nothing until it is launched."""
