"""How fast this machine multiplies rows by weights in each format, and which format that speaks for."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from retrieve_spec.kernels.row_programs import CAN_RUN, packed_product, row_product
from retrieve_spec.kernels.vector_code import has_bfloat16_products
from retrieve_spec.quantized import pack

_BETTER = 1.3
"""Formats are named from this many times the speed on."""


def product_times() -> dict[str, int]:
    """By format of weights, the microseconds that eight rows times a weight (2048, 2048) take; none uncompiled."""
    if not CAN_RUN:
        return {}
    rows, weight = torch.randn(8, 2048), torch.randn(2048, 2048)
    half, short = rows.to(torch.bfloat16), weight.to(torch.bfloat16)
    float16_rows, float16 = rows.half(), weight.half()
    byte, four = pack(weight, 8), pack(weight, 4)
    lying = row_product if has_bfloat16_products() else torch.nn.functional.linear
    products: dict[str, Callable[[], torch.Tensor]] = {
        "float32": lambda: row_product(rows, weight),
        "bfloat16": lambda: lying(half, short),
        "float16": lambda: torch.nn.functional.linear(float16_rows, float16),
        "int8": lambda: packed_product(half, byte),
        "int4": lambda: packed_product(half, four),
    }
    took = dict.fromkeys(products, float("inf"))
    for _ in range(6):  # in turn, so that each weight comes from memory; the first round warms up
        for name, product in products.items():
            began = time.perf_counter()
            product()
            took[name] = min(took[name], time.perf_counter() - began)
    return {name: round(1e6 * seconds) for name, seconds in took.items()}


def advice_on_format(dtype: str, times: dict[str, int]) -> list[str]:
    """Sentences on faster formats than `dtype`, by the times of `product_times`; none where there are none."""
    own, found = times.get(dtype, 0), []
    if faster := [name for name in ("bfloat16", "int8", "int4") if times and _BETTER * times[name] < own]:
        took = ", ".join(f"{name} {times[name]}" for name in faster)
        found.append(
            f"Eight rows times a weight take {own} µs in {dtype} here ({took}): give --dtype bfloat16, or "
            "--quantize, which changes what the model says a little."
        )
    if dtype == "bfloat16" and _BETTER * times.get("float32", own) < own:
        found.append("Products of bfloat16 are slower than those of float32 here: --dtype float32.")
    return found
