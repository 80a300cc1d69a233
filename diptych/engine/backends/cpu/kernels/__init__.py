"""Compiled kernels for the host, each behind a seam that also works without it."""
