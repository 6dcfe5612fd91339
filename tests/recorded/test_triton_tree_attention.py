"""The Triton kernels, run by Triton's interpreter on the CPU, against torch's operations."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_process import COMPILER, Interpret, compiled_by

pytest.importorskip("triton")

BUCKETS = """
import numpy as np, torch
from transformers import Gemma3TextConfig, Gemma3ForCausalLM
from retrieve_spec.recorded.recorded_pass import RecordedPass
from retrieve_spec.recorded import packed_pass
from retrieve_spec.recorded.packed_pass import PassGraphs
from retrieve_spec.recorded.kv_buffer import KVBuffer
from retrieve_spec.recorded.packed_pass import LaidOut

packed_pass.why_not_triton = lambda device: ""  # the interpreter takes tensors on a CPU
packed_pass.processors = lambda device: 2

def no_graph(run):
    run()
    return run

config = Gemma3TextConfig(
    vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.2, head_dim=8, sliding_window=8,
    layer_types=["sliding_attention", "full_attention"],
)
model = Gemma3ForCausalLM(config).eval()
recorded = RecordedPass(model, 2)
cache = KVBuffer([8, 0], 128, moves_later=True)
cache.restart(recorded.no_states())
passes = PassGraphs(recorded, no_graph)
ids = torch.tensor([[(i * 37 + 11) % 99 for i in range(40)]])
expected = model(ids).logits[0]
past = 0
for rows in (13, 1, 3, 7, 1, 15):  # padded to 17, 1, 3, 9, 1 and 17 rows, some replayed behind a longer prefix
    part = ids[0, past : past + rows].numpy()
    wrong = 2 if rows > 1 else 0  # drafts in front of what is right: what a commit keeps moves with the next pass
    drafted = np.concatenate([part[:1], np.full(wrong, 5, np.int64), part[1:]]).astype(np.int32)
    depths = np.array([0] + [1] * wrong + list(range(1, rows)))
    seen = np.eye(len(drafted), dtype=bool)
    right = [0, *range(1 + wrong, len(drafted))]
    seen[np.ix_(right, right)] = np.tri(rows, dtype=bool)
    seen[1 : 1 + wrong, 0] = True
    cache.length = past
    cache.make_room(len(drafted))
    logits, _, ran = passes.run([LaidOut(drafted, depths, seen, past, cache, past)])
    torch.testing.assert_close(logits[right], expected[past : past + rows], atol=1e-4, rtol=1e-4)
    cache.commit(past, 1, np.array(right[1:], np.int32) - 1)
    past += rows
assert passes.captures == 4, passes.captures
print("same", past)
"""


PACKED = """
import numpy as np, torch
from retrieve_spec.recorded.packed_pass import LaidOut, PackedBuffer, PassShape
from retrieve_spec.kernels.attention_inputs import LayerRule
from retrieve_spec.attention import TreeMask, attend, row_depths, visible_rows
from retrieve_spec.recorded.kv_buffer import Slab
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.kernels.triton_tree_attention import packed_tree_attention

torch.manual_seed(0)
tree = DraftTree.from_paths([[1, 2, 3], [1, 4], [5, 6, 7, 8], [9]])
wide = DraftTree.from_paths([[i, i + 1] for i in range(0, 40, 2)])
LAYERS = 2

class Cache:
    def take_moves(self, most):
        return np.empty(0, np.int32)

    def __init__(self, held, offset, room, kv_heads, width):
        self.slabs = [Slab(LAYERS, 0, room)]
        self.slabs[0].offset = offset
        self.slabs[0].fit(torch.empty(1, kv_heads, 1, width), torch.empty(1, kv_heads, 1, width))
        for slab in self.slabs[0].tensors:
            slab.normal_()
            slab[:, :, held - offset :] = float("nan")  # what no pass has written
        self.addresses = np.array([[*(t.data_ptr() for t in self.slabs[0].tensors), self.slabs[0].capacity]])
        self.first_layers = [0]

cases = [
    ([(37, 0, tree), (5, 0, None), (0, 0, tree)], 2, 3, 64, {}, 1, 0, 3),
    ([(130, 0, tree), (70, 0, wide)], 2, 2, 40, {}, 3, 7, 4),
    ([(9, 0, None), (300, 200, tree), (64, 0, tree)], 1, 4, 16, {"window": 9}, 2, 1, 3),
    ([(70, 0, tree), (3, 0, None)], 2, 2, 32, {"softcap": 5.0}, 2, 3, 2),
    ([(70, 0, tree), (33, 0, tree)], 2, 2, 32, {"sinks": torch.randn(4)}, 2, 0, 2),
    ([(70, 0, tree)], 2, 2, 32, {"window": 70}, 1, 0, 1),
    ([(20, 0, wide)], 1, 1, 16, {}, 1, 24, 2),  # padding beyond a word of bits
]
for number, (given, kv_heads, groups, width, rules, splits, padding, texts) in enumerate(cases):
    laid = []
    for held, offset, drafted in given:
        seen, depths = visible_rows(1, drafted), row_depths(1, drafted)
        cache = Cache(held, offset, held - offset + len(seen) + padding + 5, kv_heads, width)
        laid.append(LaidOut(np.zeros(len(seen), np.int32), depths, seen, held + 3, cache, held))
    real = sum(len(text.ids) for text in laid)
    rows, block = real + padding, 16
    buffer = PackedBuffer(PassShape(rows, texts, block, (splits,)), 1, groups, torch.device("cpu"))
    for text in reversed(laid):
        buffer.fill([text])  # a buffer says what was written last
    buffer.fill(laid)
    query = torch.randn(rows, kv_heads * groups, width).transpose(0, 1)  # as models hand it over
    keys, values = (torch.randn(rows, kv_heads, width).transpose(0, 1) for _ in range(2))
    layer = number % LAYERS
    before = [slab.clone() for text in laid for slab in text.cache.slabs[0].tensors]
    got = packed_tree_attention(
        query, keys, values, buffer.texts(0), LayerRule(0.2, **rules), layer=layer, block=block, splits=splits
    )
    start = 0
    for i, text in enumerate(laid):
        n, (held, offset) = len(text.ids), given[i][:2]
        span, behind = slice(start, start + n), held - offset + n
        own = [slab[layer] for slab in text.cache.slabs[0].tensors]
        for slab, was, new in zip(own, before[2 * i : 2 * i + 2], (keys, values), strict=True):
            assert torch.equal(slab[:, held - offset : behind], new[:, span])
            assert torch.equal(slab[:, : held - offset], was[layer][:, : held - offset])
            written = behind + (padding if i == len(laid) - 1 else 0)
            assert slab[:, written:].isnan().all()
        mask = TreeMask(groups, torch.float32, torch.device("cpu"))
        mask.set(held, text.seen, text.depths)
        own = [slab[None, :, :behind] for slab in own]
        expected = attend(query[None, :, span], *own, mask, LayerRule(0.2, **rules))[0]
        torch.testing.assert_close(got[span], expected, atol=2e-5, rtol=2e-5)
        start += n
    assert got.isfinite().all()  # padding, too
    now = [slab for text in laid for slab in text.cache.slabs[0].tensors]
    for slab, was in zip(now, before, strict=True):
        torch.testing.assert_close(slab[1 - layer], was[1 - layer], atol=0, rtol=0, equal_nan=True)
print("same", len(cases))
"""


def test_several_texts_in_one_launch_are_each_alone(interpret: Interpret) -> None:
    """Texts, trees, slabs and padding of any size: what the kernel says of one text, and where it writes."""
    assert interpret(PACKED) == "same 7"


def test_bucket_passes_agree_with_the_model(interpret: Interpret) -> None:
    """Padding, slots and replay of the CUDA graph buckets, with a plain call in place of the graph."""
    assert interpret(BUCKETS) == "same 40"


EXACT = """
import numpy as np, torch
from retrieve_spec.recorded.packed_pass import LaidOut, PackedBuffer, PassShape
from retrieve_spec.attention import row_depths, visible_rows
from retrieve_spec.kernels.attention_inputs import LayerRule
from retrieve_spec.recorded.kv_buffer import KEY_BLOCK, Slab
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.kernels.triton_tree_attention import ZONE, packed_tree_attention

assert ZONE.value == KEY_BLOCK

def matmul(a, b, dtype):  # BLAS adds up a row otherwise by where it stands in a matrix, tensor cores do not
    return (a.astype(dtype)[:, :, None] * b.astype(dtype)).sum(1)

np.matmul = matmul
torch.manual_seed(0)
HEADS, GROUPS, WIDTH, BLOCK = 1, 2, 16, 16
states = torch.randn(3, 400, 1, WIDTH)  # of a text: queries, keys, values by position
other = torch.randn(3, 400, 1, WIDTH)  # of what is drafted wrongly

class Cache:
    def __init__(self, held, offset):
        self.slabs, self.first_layers = [Slab(1, 0, held - offset + 70)], [0]
        self.slabs[0].offset = offset
        self.slabs[0].fit(states[1, None, :0].transpose(1, 2), states[2, None, :0].transpose(1, 2))
        for slab, given in zip(self.slabs[0].tensors, states[1:]):
            slab[0, 0, : held - offset] = given[offset:held, 0]
        self.addresses = np.array([[*(t.data_ptr() for t in self.slabs[0].tensors), self.slabs[0].capacity]])

    def take_moves(self, most):
        return np.empty(0, np.int32)

def attend(held, offset, tree, right, splits, rules, exact=True):
    # of the root and the nodes `right` behind it, which the text goes on with
    seen, depths = visible_rows(1, tree), row_depths(1, tree)
    rows = len(seen)
    query, keys, values = other[:, held : held + rows].clone()
    for node, position in zip([0, *(1 + n for n in right)], range(held, held + 64)):
        query[node], keys[node], values[node] = states[:, position]
    laid = [LaidOut(np.zeros(rows, np.int32), depths, seen, held, Cache(held, offset), held)]
    buffer = PackedBuffer(PassShape(rows, 1, BLOCK, (splits,)), 1, GROUPS, torch.device("cpu"))
    buffer.fill(laid)
    query = query.expand(rows, HEADS * GROUPS, WIDTH).transpose(0, 1)
    out = packed_tree_attention(
        query, keys.transpose(0, 1), values.transpose(0, 1), buffer.texts(0), LayerRule(0.3, **rules), layer=0,
        block=BLOCK, splits=splits, exact=exact,
    )
    return out[[0, *(1 + n for n in right)]]

def differing(held, offset, length, splits, rules, exact=True):
    # rows of a draft whose attention is another one than behind the same text without a draft
    wrong = [[1, 2, 3], [9, 5]] if length < 60 else []  # nodes between those that the text goes on with
    tree = DraftTree.from_paths([*wrong, list(range(9, 9 + length))])
    right, last = [], -1
    for token in range(9, 9 + length):
        last = next(n for n in range(len(tree)) if tree.parent[n] == last and tree.token_ids[n] == token)
        right.append(last)
    drafted = attend(held, offset, tree, right, splits, rules, exact)
    depths = (0, length)
    alone = [attend(held + depth, offset % 64, None, [], splits, rules, exact)[0] for depth in depths]
    return sum(not torch.equal(drafted[depth], one) for depth, one in zip(depths, alone, strict=True))

cases = [
    (0, 0, 9, 2, {}), (60, 0, 10, 2, {}), (120, 0, 63, 3, {}), (254, 0, 4, 3, {"softcap": 5.0}),
    (190, 64, 20, 1, {"window": 90}), (318, 128, 4, 1, {"sinks": torch.randn(2), "window": 100}),
]
print([differing(*case) for case in cases], differing(*cases[3], exact=False) > 0)
"""


def test_exact_attention_is_the_same_bit_for_bit(interpret: Interpret) -> None:
    """What a row gets hangs on its position alone: not on drafts beside it, nor on which keys are held before."""
    assert interpret(EXACT) == "[0, 0, 0, 0, 0, 0] True", "usual attention is another one"


COMPILED = """
from retrieve_spec.kernels import triton_tree_attention as kernels
from retrieve_spec.kernels.triton_tree_attention import launch_options

INTS = ("words", "depths", "prefix", "starts", "tiles", "places", "sources")
POINTERS = dict.fromkeys(INTS, "*i32") | {"slabs": "*i64", "lse": "*fp32", "parts": "*fp32"}
ALIGNED = ("query", "keys", "values", "out", "lse")

def of(kernel, dtype, constants, architecture, **options):
    types = {"out": "*fp32"} | POINTERS | {"scale": "fp32", "softcap": "fp32"}
    types |= {name: "*" + dtype for name in ("query", "keys", "values", "sinks", "kind")}
    aligned = [name for name in kernel.arg_names if name in ALIGNED or name.endswith("stride")]
    return made(kernel, types, constants, architecture, aligned, **options)

for architecture, dtype, size, width, window, capped, exact in (
    (90, "bf16", 2, 128, 0, False, False), (86, "bf16", 2, 256, 64, True, False),
    (86, "fp32", 4, 128, 64, False, False), (90, "bf16", 2, 128, 64, False, True),
):
    options = launch_options(1 if exact else 260, width, size)
    stages = options.pop("num_stages")
    constants = {"D": width, "WINDOW": window, "CAPPED": capped, "EXACT": exact, **options}
    done = of(kernels.attend_split, dtype, constants, architecture, num_stages=stages)
    held = done.metadata.shared
    assert held <= {86: 99, 90: 227}[architecture] * 1024, (dtype, width, held)
    lines = [line for line in done.asm["ptx"].splitlines() if "cp.async" in line and ".shared.global" in line]
    wide = sum("0x10" in line for line in lines)
    if size == 2:  # keys and values come in 16 bytes at a time, from addresses read from memory; bits are few
        assert len(lines) - wide < wide / 2 and wide > 8, (width, wide, len(lines))
for sinks in (False, True):
    constants = {"D": 128, "BLOCK_D": 128, "BLOCK_S": 64, "SINKS": sinks}
    assert of(kernels.merge_splits, "bf16", constants, 90).metadata.shared <= 48 * 1024
assert of(kernels.move_kept_rows, "bf16", {"D": 128, "BLOCK_D": 128}, 90, num_warps=1).metadata.shared == 0
print("compiled")
"""


def test_kernels_compile_within_the_shared_memory_of_gpus(tmp_path: Path) -> None:
    """By Triton's compiler and assembler, which need no GPU."""
    assert compiled_by(COMPILER + COMPILED, tmp_path) == "compiled"
