"""Number formats: sixteen bits are verified as float32 is, and no fault of a pass is taken for their rounding."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from families import FAMILIES, Family, build
from numpy.typing import NDArray

from retrieve_spec import attention
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.recorded import recorded_verifier
from retrieve_spec.recorded.kv_buffer import KVBuffer
from retrieve_spec.recorded.recorded_pass import RecordedPass
from retrieve_spec.recorded.verifier_factory import try_recording
from retrieve_spec.verify import pass_inputs
from retrieve_spec.verify.cache import KeptRows
from retrieve_spec.verify.comparison import is_exact
from retrieve_spec.verify.interface import read_interface
from retrieve_spec.verify.probe import probe
from retrieve_spec.verify.shrink import first_layers

HALVES = [torch.bfloat16, torch.float16]


def of(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_sixteen_bits_are_verified_as_float32_is(family: Family, dtype: torch.dtype) -> None:
    model = build(family, family.attention[0])
    wanted = probe(model, read_interface(model))
    model = model.to(dtype)
    found = probe(model, read_interface(model))
    assert (found.mode, found.interface.takes_padding) == (wanted.mode, wanted.interface.takes_padding), found.reason


def test_first_layers_are_the_models_own_in_float32() -> None:
    """Of every kind one at least, two in all; the vocabulary is cut."""
    family = Family("gemma3_text", extra={
        "num_hidden_layers": 7, "sliding_window": 8, "vocab_size": 5000,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 3,
    })  # fmt: skip
    model = build(family).to(torch.bfloat16)
    first = first_layers(model)
    assert first.dtype == torch.float32 and is_exact(first) and not is_exact(model)
    assert len(first.model.layers) == 4 and first.config.layer_types == model.config.layer_types[:4]
    assert first.get_input_embeddings().weight.shape[0] == 4096
    for ours, theirs in zip(first.model.layers.parameters(), model.model.layers.parameters(), strict=False):
        assert torch.equal(ours, theirs.float())


def masks(change: Callable[[NDArray[np.bool_], Any], None]) -> Callable[..., None]:
    """`fill_tree_mask` with a change of what the nodes see: the mask's last rows and columns, and the parents."""

    def fill(mask: Any, parent: Any, depth: Any, roots: int, past: int, *others: Any) -> None:
        true_fill(mask, parent, depth, roots, past, *others)
        if len(parent):
            change(mask[:, mask.shape[1] - len(mask) :], parent)

    return fill


true_fill, true_keep = pass_inputs.fill_tree_mask, KeptRows.commit
true_visible, true_depths, true_attend = (
    attention.visible_rows, attention.row_depths, recorded_verifier.RecordedVerifier.attend,
)  # fmt: skip
true_commit = KVBuffer.commit


def sibling_seen(seen: NDArray[np.bool_], parent: Any) -> None:
    seen[-1, len(seen) - len(parent)] = True


def parent_hidden(seen: NDArray[np.bool_], parent: Any) -> None:
    if (node := int(parent[-1])) >= 0:
        seen[-1, len(seen) - len(parent) + node] = False


def placed_otherwise(where: Any, by: int) -> Any:
    def depths(roots: int, tree: Any) -> NDArray[np.int64]:
        found = true_depths(roots, tree).copy()
        found[roots:] += by
        return found

    return mock.patch.object(where, "row_depths", depths)


def stale(self: Any, path: Any, nodes: int) -> None:
    true_keep(self, np.arange(len(path), dtype=np.int32), nodes)


def wider(mask: Any, parent: Any, depth: Any, roots: int, past: int, offset: int, window: int, *others: Any) -> None:
    true_fill(mask, parent, depth, roots, past, offset, window - 1 if window else 0, *others)


OWN: dict[str, Any] = {
    "a sibling is seen": lambda: mock.patch.object(pass_inputs, "fill_tree_mask", masks(sibling_seen)),
    "a parent is hidden": lambda: mock.patch.object(pass_inputs, "fill_tree_mask", masks(parent_hidden)),
    "a row is stale": lambda: mock.patch.object(KeptRows, "commit", stale),
    "positions + 1": lambda: placed_otherwise(pass_inputs, 1),
    "positions + 3": lambda: placed_otherwise(pass_inputs, 3),
    "a window is off by one": lambda: mock.patch.object(pass_inputs, "fill_tree_mask", wider),
}
SUBJECTS = {
    "llama": {}, "gemma3_text": {"a window is off by one"}, "llama4_text": {}, "qwen3_next": {}, "mixtral": {},
}  # fmt: skip
"""Full, sliding, chunked, hybrid and expert layers, and the faults that only some of them show."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("name", SUBJECTS)
def test_faults_of_a_pass_are_no_rounding(name: str, dtype: torch.dtype) -> None:
    """Planted into passes of the model's own forward; what only sliding layers show is planted there."""
    model = build(of(name)).to(dtype)
    assert probe(model, read_interface(model)).mode == "tree"
    for fault, plant in OWN.items():
        if fault == "a window is off by one" and fault not in SUBJECTS[name]:
            continue
        with plant():
            found = probe(model, read_interface(model))
        # a way that has nothing to do with the fault: positions are put where the model derives them
        assert found.mode != "tree" or (fault.startswith("positions") and found.interface.places), fault


def seen_otherwise(change: Callable[[NDArray[np.bool_], Any], None]) -> Any:
    def visible(roots: int, tree: Any) -> NDArray[np.bool_]:
        seen = true_visible(roots, tree).copy()
        if tree is not None and len(tree):
            change(seen, tree.parent)
        return seen

    return mock.patch.object(recorded_verifier, "visible_rows", visible)


def swapped(self: Any, query: Any, keys: Any, values: Any, layer: int) -> Any:
    return true_attend(self, query, keys.flip(1), values, layer)


def windows_off_by_one() -> Any:
    made = RecordedPass.__init__

    def narrower(self: Any, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        self.rules = [replace(rule, window=rule.window - 1) if rule.window else rule for rule in self.rules]

    return mock.patch.object(RecordedPass, "__init__", narrower)


RECORDED: dict[str, Any] = {
    "a sibling is seen": lambda: seen_otherwise(sibling_seen),
    "a parent is hidden": lambda: seen_otherwise(parent_hidden),
    "a row is stale": lambda: mock.patch.object(
        KVBuffer, "commit", lambda self, base, roots, path: true_commit(self, base, roots, np.arange(len(path)))
    ),
    "positions + 1": lambda: placed_otherwise(recorded_verifier, 1),
    "positions + 3": lambda: placed_otherwise(recorded_verifier, 3),
    "a head's keys are another's": lambda: mock.patch.object(recorded_verifier.RecordedVerifier, "attend", swapped),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_faults_of_recorded_passes_are_no_rounding(name: str, dtype: torch.dtype) -> None:
    model = build(of(name)).to(dtype)
    finding = probe(model, read_interface(model))
    config = SpeculationConfig(recorded_pass="always")
    recording, why = try_recording(model, finding, config)
    assert recording is not None, why
    faults = RECORDED | ({"a window is off by one": windows_off_by_one} if name == "gemma3_text" else {})
    for fault, plant in faults.items():
        with plant():
            recording, why = try_recording(model, finding, config)
        assert recording is None and why, fault
