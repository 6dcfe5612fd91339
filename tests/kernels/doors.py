"""Modules of kernels, all of which Python may call: `from doors import alignment`."""

import functools
import importlib
from typing import Any

from numba import njit


class _Doors:
    def __init__(self, name: str) -> None:
        self._module = importlib.import_module(f"retrieve_spec.kernels.{name}")

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if getattr(value, "targetoptions", {}).get("no_cpython_wrapper"):
            value = njit(cache=True, nogil=True)(value.py_func)
        setattr(self, name, value)
        return value


@functools.cache
def __getattr__(name: str) -> _Doors:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Doors(name)
