"""What a probe found in an earlier process answers for the same model, and for no other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_decoders import build, check
from transformers.models.llama import modeling_llama

import retrieve_spec as rs
from retrieve_spec import acceleration
from retrieve_spec.config import PassConfig
from retrieve_spec.recorded import verdicts
from retrieve_spec.recorded.verdicts import key_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for findings about small models, too."""
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(verdicts, "key_of", key_of)
    monkeypatch.setattr(verdicts, "PASS", PassConfig(min_parameters=0))
    return tmp_path / "verdicts"


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A model for each time that one was probed."""
    probed: list[Any] = []
    probe = acceleration.probe
    monkeypatch.setattr(acceleration, "probe", lambda model, read: (probed.append(model), probe(model, read))[1])
    return probed


def accelerated(model: Any = None, **options: Any) -> Any:
    return rs.accelerate(build("llama") if model is None else model, **{"recorded_pass": "always"} | options)


@pytest.mark.parametrize(
    ("options", "dtype", "kind"),
    [
        ({}, torch.float32, "recorded"),
        ({"recorded_pass": "off"}, torch.float32, "model's own"),
        ({}, torch.bfloat16, "recorded"),
    ],
)
def test_a_later_process_does_not_probe(
    options: dict[str, Any], dtype: torch.dtype, kind: str, probes: list[Any], cache: Path
) -> None:
    first = accelerated(build("llama", dtype), **options)
    before = first.speculation
    model = accelerated(build("llama", dtype), **options)
    assert len(probes) == 1 and len(list(cache.iterdir())) == 1
    now = model.speculation
    assert now.interface == before.interface and now.pass_kind == before.pass_kind == kind
    assert now._passes.finding.signatures.rounding == before._passes.finding.signatures.rounding
    if dtype == torch.float32:
        check(model, kind)
    model.speculation.invalidate()
    model.generate(torch.arange(5)[None], max_new_tokens=3, do_sample=False)
    assert len(probes) == 2, "who asks for a look gets one"


def _scaled(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(1.01)


def _wrapped(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU())


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "weights": lambda model, _: _scaled(model),
    "format": lambda model, _: model.bfloat16(),
    "attention": lambda model, _: model.set_attn_implementation("eager"),
    "modules": lambda model, _: _wrapped(model),
    "an attribute": lambda model, _: setattr(model.model.layers[1], "active", "b"),
    "the config": lambda model, _: setattr(model.config, "rms_norm_eps", 1e-3),
    "a hook": lambda model, _: model.register_forward_pre_hook(lambda *_: None),
    "a class": lambda _, patch: patch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x),
    "torch": lambda _, patch: patch.setattr(torch, "__version__", "3.0"),
    "this library": lambda _, patch: patch.setattr(verdicts, "_code_of", lambda _: []),
    "the environment": lambda _, patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
}


def test_what_findings_depend_on_is_probed_again(probes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    accelerated(recorded_pass="off")
    for number, (name, change) in enumerate(CHANGES.items(), 2):
        model = build("llama")
        with monkeypatch.context() as patched:
            change(model, patched)
            accelerated(model, recorded_pass="off")
        assert len(probes) == number, name
    accelerated(recorded_pass="off")
    assert len(probes) == 1 + len(CHANGES), "without a change the first finding answers"


def test_options_are_part_of_it(probes: list[Any]) -> None:
    for options in ({}, {"recorded_pass": "off"}, {"exact": True}):
        accelerated(**options)
    assert len(probes) == 3


def test_another_trace_is_probed_again(probes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A function was replaced that nothing else shows."""
    accelerated()
    rotate = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: rotate(q * 2, k, cos, sin))
    check(accelerated())
    assert len(probes) == 2


DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda content: b"",
    lambda content: content[:-20],
    lambda content: content.replace(b"true", b"fals"),
    lambda content: content.replace(b'"takes_padding": true', b'"takes_padding": false'),
    lambda content: b"[1, 2]",
    lambda content: b"\xff\xfe",
]


def test_a_damaged_file_is_written_anew(probes: list[Any], cache: Path) -> None:
    accelerated(recorded_pass="off")
    (file,) = cache.iterdir()
    whole = json.loads(file.read_bytes())["found"]["verdict"]
    for number, damage in enumerate(DAMAGES, 1):
        file.write_bytes(damage(file.read_bytes()))
        accelerated(recorded_pass="off")
        assert len(probes) == 1 + number and json.loads(file.read_bytes())["found"]["verdict"] == whole, number
    accelerated(recorded_pass="off")
    assert len(probes) == 1 + len(DAMAGES)


def test_what_cannot_be_kept_is_done_without(probes: list[Any], cache: Path) -> None:
    cache.write_text("a file where the folder would be")
    for _ in range(2):
        check(accelerated())
    assert len(probes) == 2 and os.listdir(cache.parent) == ["verdicts"]


def test_models_that_no_file_knows_are_probed(probes: list[Any], cache: Path) -> None:
    for _ in range(2):
        model = build("llama")
        model.model.layers[0].mlp.forward = model.model.layers[0].mlp.forward
        accelerated(model)
    assert len(probes) == 2 and not cache.exists()


def test_patched_masks_and_attention_are_other_models(reference_model, monkeypatch):
    """What a forward calls belongs to what a verdict depends on, wherever it stands."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama import modeling_llama

    from retrieve_spec.config import SpeculationConfig

    def key():
        return key_of(reference_model, SpeculationConfig(), "last")

    before = key()
    assert before is not None and before == key()
    with monkeypatch.context() as patched:
        patched.setattr(modeling_llama, "create_causal_mask", lambda *_, **__: None)
        assert key() != before
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with monkeypatch.context() as patched:
        patched.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *given, **more: attend(*given, **more))
        assert key() != before
    assert key() == before
