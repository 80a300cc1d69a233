"""NVIDIA devices: torch's products, and Triton kernels for all between them."""
