"""How many kernels a pass launches on a GPU, counted without one: kernels are counted in place of being run."""

from __future__ import annotations

import pytest
from triton_process import Interpret

pytest.importorskip("triton")

COUNTED = """
from collections import Counter
import numpy as np, torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime.interpreter import InterpretedFunction
from retrieve_spec.kernels import triton_products, triton_rows
from retrieve_spec.recorded import packed_pass
from retrieve_spec.recorded.kv_buffer import KVBuffer
from retrieve_spec.recorded.packed_pass import LaidOut, PackedPass, shape_of
from retrieve_spec.recorded.recorded_pass import RecordedPass

triton_products._limits = lambda device: (132, 227 << 10)
packed_pass.processors = lambda device: 132
LAYERS = 2
launched = Counter()

class Operations(TorchDispatchMode):
    # torch's own that compute something
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = ([a for a in tree_leaves(each) if isinstance(a, torch.Tensor)] for each in ((args, kwargs), out))
        known = {a.untyped_storage().data_ptr() for a in given}
        computes = any(a.untyped_storage().data_ptr() not in known for a in made) and "empty" not in str(func)
        launched["torch"] += computes or func._schema.is_mutable
        return out

def count(self, *args, grid, **options):
    launched[self.fn.__name__] += 1

InterpretedFunction.run = count

def text(recorded, rows, held=0):
    cache = KVBuffer([0] * LAYERS, 128, moves_later=True)
    cache.restart(recorded.no_states())
    cache.make_room(rows)
    return LaidOut(np.zeros(rows, np.int32), np.arange(rows), np.tri(rows, dtype=bool), held, cache, held)

def launches(recorded, rows):
    laid = [text(recorded, rows)]
    cache = laid[0].cache
    packed = PackedPass(recorded, cache, shape_of(recorded, laid, rows, 1))
    packed.fill(laid)
    launched.clear()
    with Operations():
        packed.run()
    return dict(launched)

def sizes(hidden, inner, heads, kv_heads, width):
    return dict(hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads,
                head_dim=width, num_hidden_layers=LAYERS, vocab_size=128)

small, large = sizes(576, 1536, 9, 3, 64), sizes(4096, 14336, 32, 8, 128)
def built(family, given):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given), dtype=torch.bfloat16).eval()
    return RecordedPass(model, LAYERS, row_kernels=triton_rows)
"""

BY_LAYER = """
for family, given in FAMILIES:
    recorded = built(family, given)
    found = [launches(recorded, rows) for rows in (1, 9, 64)]
    assert found[0] == found[1] == found[2], found
    by_layer = {name: round(n / LAYERS) for name, n in found[0].items() if n >= LAYERS and name != "torch"}
    print(family, sum(found[0].values()) - LAYERS * sum(by_layer.values()), sorted(by_layer.items()))
"""


def test_a_layer_takes_few_launches(interpret: Interpret) -> None:
    """Of a Llama as small as 135 M parameters and of one of 8 B: as many for one token as for nine and for 64."""
    told = interpret(COUNTED + BY_LAYER.replace("FAMILIES", '(("llama", small), ("llama", large))')).splitlines()
    by_layer = [("_linears", 4), ("_rms_norm", 2), ("attend_split", 1), ("merge_splits", 1)]
    assert told == [f"llama 11 {by_layer}"] * 2


def test_heads_that_are_normalised_are_rotated_apart(interpret: Interpret) -> None:
    told = interpret(COUNTED + BY_LAYER.replace("FAMILIES", '(("qwen3", small),)'))
    by_layer = [("_linears", 4), ("_rms_norm", 4), ("_rotate", 1), ("attend_split", 1), ("merge_splits", 1)]
    assert told == f"qwen3 11 {by_layer}"


SPLITS = """
for given in (small, large):
    recorded = built("llama", given)
    for exact in (0, 1):
        recorded.exact = exact
        counts = []
        for rows in (1, 8, 64):
            for held in (500, 20_000, 130_000):
                splits = set(shape_of(recorded, [text(recorded, rows, held)], rows, 1).splits)
                counts += splits
        print(counts)
"""


def test_a_long_context_is_read_by_more_programs(interpret: Interpret) -> None:
    """Of one of 132 multiprocessors each, for each key head and block of queries; exact passes always add up alike."""
    assert interpret(COUNTED + SPLITS).splitlines() == [
        "[16, 64, 64, 16, 64, 64, 16, 29, 29]", "[16, 16, 16, 16, 16, 16, 16, 16, 16]",
        "[16, 33, 33, 16, 33, 33, 8, 8, 8]", "[16, 16, 16, 16, 16, 16, 16, 16, 16]",
    ]  # fmt: skip
