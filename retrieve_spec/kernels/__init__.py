"""Numba and Triton kernels: arrays and scalars in, arrays out; no validation."""
