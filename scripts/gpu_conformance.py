"""Section `conformance` of `gpu_check.py`: drafted against plain output of tiny models."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_setting import Attempt, Setting
from transformers import AutoConfig, AutoModelForCausalLM

import retrieve_spec as rs
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.recorded import recorded_verifier
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import read_interface

FAMILIES = ("llama", "gemma3_text", "mistral", "mixtral", "qwen3", "phi3", "qwen2")


def conformance(setting: Setting, attempt: Attempt) -> None:
    """Drafted against plain output of tiny models; float32, where nothing may differ, comes first."""
    attempt("drafting kernels s", compile_kernels)
    for dtype in (torch.float32, torch.bfloat16):
        for family in FAMILIES[:2] if setting.dry else FAMILIES:
            attempt(f"{family} {str(dtype)[6:]}", lambda family=family, dtype=dtype: compare(setting, family, dtype))


def compile_kernels() -> float:
    """Seconds until the drafter's kernels are compiled, or loaded from Numba's cache."""
    began = time.perf_counter()
    MixtureDrafter().prepare()
    return round(time.perf_counter() - began, 1)


def tiny_model(setting: Setting, family: str, dtype: torch.dtype) -> Any:
    """A random model of a family."""
    common: dict[str, Any] = dict(  # noqa: C408
        vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.2, eos_token_id=None,
        pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    common |= {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "mixtral" else {}
    common |= {"sliding_window": 16} if family in ("mistral", "gemma3_text") else {}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **common)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(setting.device)


def compare(setting: Setting, family: str, dtype: torch.dtype) -> dict[str, Any]:
    """Whether outputs are the same, by kind of pass; where not, at which token and how near the best two are there."""
    model = tiny_model(setting, family, dtype)
    rows = [[3 + (i * 37 + 11 + 5 * row) % 190 for i in range(40)] for row in range(3)]
    ids = torch.tensor(rows, device=setting.device)
    options = {"max_new_tokens": 32 if setting.dry else 96, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids[:1], **options)
    together = model.generate(ids, **options)
    rs.accelerate(model, nodes=24, recorded_pass="always")
    static, interface = model.speculation._make_verifier, read_interface(model)
    recorded = isinstance(static(), recorded_verifier.RecordedVerifier)
    recording = model.speculation._passes.recording
    found: dict[str, Any] = {"static": recorded}

    def compared(makes: Callable[[], Any], given: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
        model.speculation._make_verifier = makes()
        answers = expected[:, 40:].tolist()
        ours = model.generate(given, prediction=answers if len(answers) > 1 else answers[0], **options)
        return difference(model, expected, ours) | {"tokens_per_pass": model.speculation.last.tokens_per_pass}

    kinds: dict[str, Any] = {"own forward": (lambda: lambda: HFVerifier(model, interface), ids[:1], plain)}
    if recorded:
        kinds |= {"static": (lambda: static, ids[:1], plain), "batch": (lambda: static, ids, together)}
        kinds |= {"graphs": (lambda: setting.graph_maker(recording), ids[:1], plain)}
        kinds |= {"batch graphs": (lambda: setting.graph_maker(recording), ids, together)}
    for kind, arguments in kinds.items():
        try:
            found[kind] = compared(*arguments)
        except Exception as error:  # the other kinds are worth a line, too
            found[kind] = {"same": False, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
    rs.restore(model)
    return found


def difference(model: Any, plain: torch.Tensor, ours: torch.Tensor) -> dict[str, Any]:
    """Whether (rows, length) outputs are the same, and how near the best two tokens are where they part first."""
    if torch.equal(plain, ours):
        return {"same": True}
    row, at = (int(place) for place in (plain != ours).nonzero()[0])
    top = model(plain[row : row + 1, :at]).logits[0, -1].float().topk(2).values
    gap, best = float(top[0] - top[1]), float(top[0])
    return {"same": False, "row": row, "position": at, "gap": round(gap, 5), "top": round(best, 3)}
