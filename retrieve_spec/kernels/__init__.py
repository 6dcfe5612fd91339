"""Numba and Triton kernels: arrays and scalars in, arrays out; no validation."""

from retrieve_spec.kernels.compiled_code import drop_stale_kernels

drop_stale_kernels()
