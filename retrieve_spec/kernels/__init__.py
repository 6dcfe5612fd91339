"""Numba and Triton kernels over arrays and scalars; they check nothing."""

from retrieve_spec.kernels.compiled_code import drop_stale_kernels

drop_stale_kernels()
