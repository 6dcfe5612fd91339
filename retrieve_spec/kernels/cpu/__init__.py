"""Arithmetic of a model's passes on a CPU, independent of drafting.

Products with weights of 4, 8, 16 and 32 bits, attention, and the other operations of a decoder layer, as programs that
one compiled call runs (`RowProgram`), or one operation at a time (`row_product`, `packed_product`, `layer_rows`). Code
outside the package imports from here only.
"""

from retrieve_spec.kernels.compiled_code import drop_stale_kernels
from retrieve_spec.kernels.cpu import layer_rows
from retrieve_spec.kernels.cpu.number_formats import LIKE
from retrieve_spec.kernels.cpu.packed_products import FLOATS, NF4, bits_of, unpack
from retrieve_spec.kernels.cpu.row_programs import (
    CAN_RUN,
    NOWHERE,
    ZEROS,
    RowProgram,
    RowTexts,
    Step,
    attends_fast_for_many,
    is_fast_for_many,
    packed_product,
    row_product,
    serves,
    unpacked_product,
)
from retrieve_spec.kernels.cpu.vector_code import GROUP, GROUP_BYTES, LANES, UNPACKED

__all__ = [
    "CAN_RUN",
    "FLOATS",
    "GROUP",
    "GROUP_BYTES",
    "LANES",
    "LIKE",
    "NF4",
    "NOWHERE",
    "UNPACKED",
    "ZEROS",
    "RowProgram",
    "RowTexts",
    "Step",
    "attends_fast_for_many",
    "bits_of",
    "is_fast_for_many",
    "layer_rows",
    "packed_product",
    "row_product",
    "serves",
    "unpack",
    "unpacked_product",
]

drop_stale_kernels(layer_rows.rms_norm)
