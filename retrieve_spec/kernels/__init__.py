"""Numba and Triton kernels over arrays and scalars, without checks of their arguments."""

from retrieve_spec.kernels.compiled_code import drop_stale_kernels

drop_stale_kernels()
