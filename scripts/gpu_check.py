"""Checks and measures the verifying pass on one GPU, without downloads; prints tables and one JSON object as last line.

    python scripts/gpu_check.py [--sizes 1b 8b] [--context 512 4096] [--trace FILE] [--quick]

1. Conformance: tiny random models in float32 and bfloat16, drafted against plain `generate`; every difference is listed
   with the gap between the two most probable tokens.
2. Cost curves T(n, L) of random-weight Llama-shaped models in bfloat16, without and with CUDA graphs, next to the floor
   (weight bytes / measured read bandwidth).
3. Decoding in one run: plain `generate`, `generate` with a static cache, prompt lookup, ours. The target is
   *trace-driven*: random weights do all the work of a real pass, then the recorded token is made the most probable one.

`--trace` takes JSON lines with `prompt` and `output` token ids; by default the bundled model's card is the text.
`--device cpu --quick` runs the script's own logic on a machine without a GPU; its figures then mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LogitsProcessorList

import retrieve_spec as rs
from retrieve_spec.bench.machine import machine_facts
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.decoding import fast_verifier
from retrieve_spec.decoding.interface import read_interface
from retrieve_spec.decoding.probe import probe
from retrieve_spec.decoding.verifier import Verifier, VerifierInputs, VerifierOutput
from retrieve_spec.drafting.tree import DraftTree

SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 512),
    "1b": (2048, 8192, 16, 32, 8, 128_256),
    "8b": (4096, 14_336, 32, 32, 8, 128_256),
}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "mixtral")
NOTHING = np.empty(0, np.int32)
SURE = 1e4


def build(size: str, context: int, device: str, dtype: torch.dtype) -> Any:
    """A random-weight Llama of a size, made on the device."""
    hidden, inner, layers, heads, kv_heads, vocab = SHAPES[size]
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=context + 2048,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.pad_token_id = 0
    return model


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def median_ms(run: Callable[[], Any], device: str, repeats: int) -> float:
    """Median milliseconds of a call, after three warm-up calls."""
    times = []
    for repeat in range(repeats + 3):
        wait(device)
        began = time.perf_counter()
        run()
        wait(device)
        if repeat >= 3:
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def bandwidth(device: str, quick: bool) -> float:
    """Bytes per second of reading a large tensor."""
    data = torch.ones((64 << 20) if not quick else (1 << 20), dtype=torch.bfloat16, device=device)
    return data.nbytes / (median_ms(lambda: data.view(torch.int16).max(), device, 10) / 1e3)


def conformance(device: str, families: tuple[str, ...] = FAMILIES) -> list[dict[str, Any]]:
    """Drafted against plain output of tiny models; differences with the gap of the top two logits."""
    common: dict[str, Any] = dict(  # noqa: C408
        vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.2, eos_token_id=None,
        pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    rows = []
    for name in families:
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            extra = {"num_local_experts": 4, "num_experts_per_tok": 2} if name == "mixtral" else {}
            extra |= {"sliding_window": 16} if name in ("mistral", "gemma3_text") else {}
            config = AutoConfig.for_model(name, **common, **extra)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(device)
            ids = torch.tensor([[3 + (i * 37 + 11) % 190 for i in range(40)]], device=device)
            options = {"max_new_tokens": 96, "do_sample": False, "pad_token_id": 0}
            plain = model.generate(ids, **options)
            rs.accelerate(model, nodes=24, static_pass="always")
            static = isinstance(model.speculation._make_verifier(), fast_verifier.StaticVerifier)
            ours = model.generate(ids, **options)
            rs.restore(model)
            row = {"model": name, "dtype": str(dtype)[6:], "static": static, "same": bool(torch.equal(plain, ours))}
            if not row["same"]:
                at = int((plain != ours).nonzero()[0, 1])
                top = model(plain[:, :at]).logits[0, -1].float().topk(2).values
                row |= {"position": at, "gap": round(float(top[0] - top[1]), 5)}
            rows.append(row)
            print(row)
    return rows


def started(make: Callable[[], Verifier], model: Any, context: int, device: str) -> Verifier:
    from transformers import DynamicCache

    prompt = torch.as_tensor((np.arange(context) * 7919 + 13) % 500, device=device)[None]
    verifier = make()
    positions = torch.arange(context, device=device)[None]
    kwargs = {"past_key_values": DynamicCache(config=model.config), "position_ids": positions}
    verifier.start(VerifierInputs(prompt, kwargs, max_length=context + 512))
    verifier.forward(prompt[0].cpu().numpy().astype(np.int32))
    verifier.commit(NOTHING)
    return verifier


def curve(
    model: Any, make: Any, context: int, widths: list[int], device: str, repeats: int, graphs: bool
) -> dict[int, float]:
    """Milliseconds of a pass by number of drafted nodes; repeated without a commit, so the context stays."""
    fast_verifier.PASS = replace(fast_verifier.PASS, cuda_graphs=graphs)
    times = {}
    try:
        verifier = started(make, model, context, device)
        for width in widths:
            tree = DraftTree.from_paths(
                [list(range(20, 20 + (width + 1) // 2)), *[[500 - i] for i in range(width // 2)]]
            )
            tree = tree if width else DraftTree()
            times[width] = median_ms(lambda t=tree: verifier.forward(np.array([5], np.int32), t), device, repeats)
        verifier.commit(NOTHING)
        verifier.finish()
    finally:
        fast_verifier.PASS = replace(fast_verifier.PASS, cuda_graphs=False)
    return times


class TraceDriven:
    """A verifier whose target is made to say the recorded text, after all its work is done."""

    def __init__(self, inner: Verifier, trace: torch.Tensor) -> None:
        self._inner, self._trace, self._past = inner, trace, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self, inputs: VerifierInputs) -> None:
        self._past = 0
        self._inner.start(inputs)

    def forward(self, root_ids: Any, tree: Any = None, *, keep: int = 1, want_hidden: Any = None) -> VerifierOutput:
        out = self._inner.forward(root_ids, tree, keep=keep, want_hidden=want_hidden)
        self._roots = len(root_ids)
        last = self._past + self._roots
        after = np.arange(last - keep + 1, last + 1)
        if tree is not None and len(tree):
            after = np.concatenate([after, last + tree.depth])
        after = torch.from_numpy(after).clamp(max=len(self._trace) - 1).to(out.logits.device)
        with torch.inference_mode():
            logits = out.logits.scatter(1, self._trace[after][:, None], SURE)
        return VerifierOutput(logits, out.hidden)

    def commit(self, path: Any) -> None:
        self._past += self._roots + len(path)
        self._inner.commit(path)


def tell(trace: torch.Tensor) -> Callable[..., Any]:
    """A logits processor that makes the recorded token the most probable one."""

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        at = min(input_ids.shape[1], len(trace) - 1)
        return scores.index_fill(1, trace[at : at + 1], SURE)

    return process


def decode(model: Any, prompt: list[int], output: list[int], device: str) -> dict[str, Any]:
    """Tokens per second of four ways to decode one recorded answer."""
    trace = torch.tensor(prompt + output, device=device)
    ids = trace[None, : len(prompt)]
    options = {"max_new_tokens": len(output), "min_new_tokens": len(output), "do_sample": False, "pad_token_id": 0}
    told = LogitsProcessorList([tell(trace)])
    results: dict[str, Any] = {}

    def timed(name: str, run: Callable[[], Any]) -> None:
        try:
            run()
            wait(device)
            began = time.perf_counter()
            out = run()
            wait(device)
            seconds = time.perf_counter() - began
            same = bool(torch.equal(out[0, : len(trace)], trace))
            results[name] = {"tokens_per_s": round(len(output) / seconds, 1), "same": same}
        except Exception as error:  # a baseline that does not run here must not cost the other figures
            results[name] = {"error": f"{type(error).__name__}: {str(error)[:120]}"}

    timed("generate", lambda: model.generate(ids, logits_processor=told, **options))
    timed("prompt lookup", lambda: model.generate(ids, logits_processor=told, prompt_lookup_num_tokens=10, **options))
    timed("static cache", lambda: model.generate(ids, logits_processor=told, cache_implementation="static", **options))
    rs.accelerate(model, static_pass="always")
    make = model.speculation._make_verifier
    model.speculation._make_verifier = lambda: TraceDriven(make(), trace)
    options.pop("min_new_tokens")
    timed("ours", lambda: model.generate(ids, **options))
    results["ours"]["tokens_per_pass"] = round(model.speculation.last.tokens_per_pass, 2)
    rs.restore(model)
    return results


def traces(path: str | None, vocab: int) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, output) token ids of recorded answers."""
    if path is not None:
        for line in Path(path).read_text().splitlines():
            record = json.loads(line)
            yield [t % vocab for t in record["prompt"]], [t % vocab for t in record["output"]]
        return
    from tokenizers import Tokenizer

    folder = Path(rs.__file__).parent / "reference"
    text = (folder / "CARD.md").read_text()
    ids = [t % vocab for t in Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids]
    yield ids[:256], ids[256:384]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", nargs="+", default=["1b", "8b"], choices=sorted(SHAPES))
    parser.add_argument("--context", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--nodes", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16, 32, 64, 128, 255])
    parser.add_argument("--trace")
    parser.add_argument("--quick", action="store_true", help="tiny model, few repeats")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.context, options.nodes = ["tiny"], [64], [0, 4, 16]
    repeats = 3 if options.quick else 15
    result: dict[str, Any] = {"device": options.device, "sizes": {}, "machine": machine_facts()}
    with torch.no_grad():
        result["conformance"] = conformance(options.device, FAMILIES[:1] if options.quick else FAMILIES)
        result["read_bytes_per_s"] = bandwidth(options.device, options.quick)
        for size in options.sizes:
            model = build(size, max(options.context), options.device, torch.bfloat16)
            weight_bytes = sum(p.nbytes for p in model.parameters())
            floor = weight_bytes / result["read_bytes_per_s"] * 1e3
            make, why = fast_verifier.try_build(
                model, probe(model, read_interface(model)), SpeculationConfig(static_pass="always")
            )
            entry: dict[str, Any] = {"floor_ms": round(floor, 3), "why_not_static": why, "curves": []}
            for context in options.context if make else ():
                for graphs in (False, True) if options.device.startswith("cuda") else (False,):
                    times = curve(model, make, context, options.nodes, options.device, repeats, graphs)
                    entry["curves"].append({"context": context, "graphs": graphs, "ms": times})
                    for nodes, ms in times.items():
                        print(f"{size} L={context} graphs={graphs} n={nodes}: {ms:.2f} ms, floor/ms {floor / ms:.2f}")
            vocab = model.config.vocab_size
            answers = list(traces(options.trace, vocab))[: 1 if options.quick else 4]
            entry["decoding (trace-driven)"] = [decode(model, p, o[:256], options.device) for p, o in answers]
            print(size, entry["decoding (trace-driven)"])
            result["sizes"][size] = entry
            del model, make
            gc.collect()
            if options.device.startswith("cuda"):
                torch.cuda.empty_cache()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
