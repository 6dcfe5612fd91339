"""Doors for Python to kernels that only kernels call."""

from __future__ import annotations

from typing import Any

from numba import njit


class Doors:
    """A module of kernels, all of which Python may call."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if getattr(value, "targetoptions", {}).get("no_cpython_wrapper"):
            value = njit(cache=True, nogil=True)(value.py_func)
        setattr(self, name, value)
        return value
