"""Section `kernels` of `gpu_check.py`: bandwidth, attention backends, acceptance, and small recorded passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gpu_setting import Attempt, Setting, draft
from torch.nn import functional
from trace_driven import build

from retrieve_spec.attention import tree_attention
from retrieve_spec.attention.online_softmax import LayerRule
from retrieve_spec.attention.tree_attention import attend
from retrieve_spec.attention.tree_mask import TreeMask, row_depths, visible_rows
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.recorded.recording import try_recording
from retrieve_spec.sampling.acceptance import RandomSampler, Warpers, walk
from retrieve_spec.sampling.device_acceptance import DeviceSampler
from retrieve_spec.sampling.pass_logits import read_logits
from retrieve_spec.sampling.text import RowText
from retrieve_spec.verify.interface import read_interface
from retrieve_spec.verify.probe import probe


def kernels(setting: Setting, attempt: Attempt) -> None:
    """Bandwidth, attention backends, acceptance, and a small recorded pass."""
    attempt("read_bytes_per_s", lambda: bandwidth(setting))
    attempt("device acceptance", lambda: acceptance(setting))
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    for backend in ("triton", "split", "masked"):
        for name, dtype in dtypes.items():
            attempt(f"attention {backend} {name}", lambda b=backend, d=dtype: attention(setting, b, d))
    if setting.on_gpu:
        attempt("rows bfloat16", lambda: row_kernels(setting))
    for name, dtype in dtypes.items():
        attempt(f"recorded pass {name}", lambda d=dtype: small_passes(setting, d))


def bandwidth(setting: Setting) -> float:
    """Bytes per second of reading a tensor much larger than any cache, the better of two ways to read it."""
    data = torch.ones(1 << (20 if setting.dry else 29), dtype=torch.float32, device=setting.device)
    return data.nbytes / (min(setting.median_ms(data.sum), setting.median_ms(data.amax)) / 1e3)


def acceptance(setting: Setting) -> dict[str, Any]:
    """Walks decided on the device against the host's, and what reading the logits of 65 rows costs."""
    vocab = 1000 if setting.dry else 128_256
    tree, rng = draft(64), np.random.default_rng(0)
    rules = [Warpers(0.8), Warpers(0.8, 50), Warpers(0.7, 0, 0.9), Warpers(1.0, 50, 0.95, 0.02, 1.2)]
    found: dict[str, Any] = {"walks": 0, "different": 0, "ms": {}}
    for seed, rule in enumerate(rules):
        logits = torch.from_numpy(rng.standard_normal((65, vocab)).astype(np.float32) * 3).to(setting.device)
        host = RandomSampler(rule, seed)
        device = DeviceSampler(host)
        prompt = torch.from_numpy(rng.integers(0, vocab, (1, 200)))
        for turn in range(5):
            scaled = (logits * (1 + turn / 4)).to(torch.bfloat16)
            texts = RowText(prompt, 300), RowText(prompt, 300)
            expected = walk(tree, read_logits(scaled, 8), 0, host, texts[0], lambda *_: False)
            read = DeviceSampler(host).read(scaled, 0, tree, texts[1], 8)
            got = walk(tree, read, 0, device, texts[1], lambda *_: False)
            found["walks"] += 1
            found["different"] += got.emitted.tolist() != expected.emitted.tolist()
        text = RowText(prompt, 300)
        found["ms"][str(rule)] = setting.median_ms(lambda d=device, x=scaled, t=text: d.read(x, 0, tree, t, 8))
        found["ms"]["greedy"] = setting.median_ms(lambda x=scaled: read_logits(x, 8))
    return found


def row_kernels(setting: Setting) -> dict[str, Any]:
    """Largest relative difference to torch, and milliseconds of each, in the shapes of an 8 B model's layer."""
    from retrieve_spec.kernels import triton_rows

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=setting.device, dtype=torch.bfloat16)

    torch.manual_seed(0)
    x, weight, gated, up = make(1, 65, 4096), make(4096), make(1, 65, 14_336), make(1, 65, 14_336)
    heads, cos, sin = make(1, 65, 32, 128).transpose(1, 2), make(1, 1, 65, 128), make(1, 1, 65, 128)

    def norm() -> torch.Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()

    def rotate() -> torch.Tensor:
        return heads * cos + torch.cat([-heads[..., 64:], heads[..., :64]], -1) * sin

    pairs: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {
        "norm": (norm, lambda: triton_rows.rms_norm(x, weight, 1e-5)),
        "rotate": (rotate, lambda: triton_rows.rotate(heads, cos, sin)),
        "gate": (lambda: functional.silu(gated) * up, lambda: triton_rows.gate(gated, up)),
    }
    found: dict[str, Any] = {}
    for name, (plain, ours) in pairs.items():
        wanted, got = plain().float(), ours().float()
        off = ((got - wanted).abs() / wanted.abs().clamp_min(1e-3)).max()
        found[name] = {
            "off": float(f"{float(off):.2g}"),
            "plain_ms": setting.median_ms(plain),
            "ms": setting.median_ms(ours),
        }
    return found


def attention(setting: Setting, backend: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Largest difference to a float64 softmax, by rule, and milliseconds in the shape of an 8 B model's layer."""
    plain = tree_attention.PASS
    tree_attention.PASS = replace(plain, attention=backend)
    try:
        rules = {"plain": LayerRule(0.1), "window": LayerRule(0.1, window=40), "softcap": LayerRule(0.1, softcap=5.0)}
        rules["sinks"] = LayerRule(0.1, sinks=torch.ones(8, device=setting.device))
        found: dict[str, Any] = {"used": {}, "error": {}}
        for name, rule in rules.items():
            query, keys, values, mask = attention_inputs(setting, dtype, 8, 2, 100, 21)
            found["used"][name] = tree_attention.choose_backend(mask, rule, 64, 64)
            got = attend(query, keys, values, mask, rule)
            wanted = dense_attention(query, keys, values, mask, rule)
            found["error"][name] = float(f"{float((got.double() - wanted).abs().max()):.2g}")
        if not setting.dry:
            query, keys, values, mask = attention_inputs(setting, dtype, 32, 8, max(setting.context), 64, 128)
            found["ms"] = setting.median_ms(lambda: attend(query, keys, values, mask, LayerRule(0.1)))
        return found
    finally:
        tree_attention.PASS = plain


def attention_inputs(
    setting: Setting, dtype: torch.dtype, heads: int, kv_heads: int, prefix: int, nodes: int, width: int = 64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TreeMask]:
    """Random queries, keys and values of one pass, and its mask."""
    torch.manual_seed(0)
    tree = draft(nodes)
    rows = nodes + 1
    shapes = ((heads, rows), (kv_heads, prefix + rows), (kv_heads, prefix + rows))
    query, keys, values = (torch.randn(1, h, n, width, device=setting.device, dtype=dtype) for h, n in shapes)
    mask = TreeMask(heads // kv_heads, dtype, torch.device(setting.device))
    mask.set(prefix, visible_rows(1, tree), row_depths(1, tree))
    return query, keys, values, mask


def dense_attention(query: Any, keys: Any, values: Any, mask: TreeMask, rule: LayerRule) -> torch.Tensor:
    """One softmax per row in float64: (1, rows, heads, d)."""
    groups, prefix = mask.groups, mask.prefix
    depths = torch.from_numpy(mask._depths).to(query.device)
    position = torch.cat([torch.arange(prefix, device=query.device) - prefix, depths])
    seen = torch.cat([torch.ones(mask.rows, prefix, dtype=torch.bool), torch.from_numpy(mask.seen)], 1)
    seen = seen.to(query.device)
    if rule.window:
        seen = seen & (depths[:, None] - position < rule.window)
    keys, values = (t.double().repeat_interleave(groups, 1) for t in (keys, values))
    scores = query.double() @ keys.transpose(2, 3) * rule.scale
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.double().view(1, -1, 1, 1).expand(-1, -1, mask.rows, -1)
        weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return (weights @ values).transpose(1, 2)


def small_passes(setting: Setting, dtype: torch.dtype) -> dict[str, str]:
    """What is wrong with the recorded passes of a tiny model, without and with graphs; empty when nothing is."""
    model = build("tiny", 128, setting.device, dtype)
    recording, why = try_recording(
        model, probe(model, read_interface(model)), SpeculationConfig(recorded_pass="always")
    )
    if recording is not None:
        setting.graph_maker(recording)
    return {"static": why, "graphs": ""}
