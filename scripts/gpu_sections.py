"""The sections of `gpu_check.py`: each hands its figures over one by one, through `attempt(name, run)`."""

from __future__ import annotations

import gc
import json
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import retrieve_spec as rs
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.decoding import fast_verifier, tree_attention
from retrieve_spec.decoding.acceptance import SamplingChooser, Warpers, read_logits, walk
from retrieve_spec.decoding.captured_pass import CapturedPass
from retrieve_spec.decoding.cuda_graphs import PassPool
from retrieve_spec.decoding.device_acceptance import DeviceChooser
from retrieve_spec.decoding.hf import HFVerifier
from retrieve_spec.decoding.interface import read_interface
from retrieve_spec.decoding.pass_mask import PassMask, row_depths, visible_rows
from retrieve_spec.decoding.probe import check_verifier, probe
from retrieve_spec.decoding.text import RowText
from retrieve_spec.decoding.tree_attention import LayerRule, attend
from retrieve_spec.decoding.verifier import Verifier, VerifierInputs, VerifierOutput
from retrieve_spec.drafting.tree import DraftTree

Attempt = Callable[[str, Callable[[], Any]], Any]
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 512),
    "1b": (2048, 8192, 16, 32, 8, 128_256),
    "8b": (4096, 14_336, 32, 32, 8, 128_256),
}
FAMILIES = ("llama", "gemma3_text", "mistral", "mixtral", "qwen3", "phi3", "qwen2")
NOTHING = np.empty(0, np.int32)
ROOT = np.array([5], np.int32)
SURE = 1e4


class Setting:
    """Where sections run and how much they do."""

    def __init__(self, options: Namespace) -> None:
        self.device: str = options.device
        self.dry: bool = options.dry_run
        self.context: list[int] = options.context
        self.nodes: list[int] = options.nodes
        self.trace: str | None = options.trace
        self.repeats = 2 if self.dry else 15
        self.new_tokens = 24 if self.dry else 256

    @property
    def on_gpu(self) -> bool:
        """Whether there is a device to wait for."""
        return self.device.startswith("cuda")

    def wait(self) -> None:
        """Let the device finish."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def median_ms(self, run: Callable[[], Any], warm_up: int = 3) -> float:
        """Median milliseconds of a call."""
        times = []
        for repeat in range(self.repeats + warm_up):
            self.wait()
            began = time.perf_counter()
            run()
            self.wait()
            if repeat >= warm_up:
                times.append((time.perf_counter() - began) * 1e3)
        return round(statistics.median(times), 4)

    def pool(self, captured: CapturedPass) -> PassPool:
        """Graphs; on a CPU a plain call stands in for each."""
        return PassPool(captured) if self.on_gpu else PassPool(captured, lambda run: (run(), run)[1], triton=False)

    def graph_maker(self, model: Any) -> Callable[[], Verifier]:
        """What makes verifiers that replay graphs; raises when their passes are not the model's."""
        captured = fast_verifier._recorded[model]
        pool, interface = self.pool(captured), read_interface(model)

        def make() -> Verifier:
            return fast_verifier.StaticVerifier(model, HFVerifier(model, interface), captured, pool)

        if problem := check_verifier(model, interface, make()):
            raise RuntimeError(problem)
        return make


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


def draft(nodes: int) -> DraftTree:
    """A tree of exactly `nodes` nodes: a main branch of half of them and short side branches."""
    main = list(range(20, 20 + (nodes + 1) // 2))
    return DraftTree.from_paths([main, *[[500 - i] for i in range(nodes - len(main))]] if nodes else [])


# --- kernels ---------------------------------------------------------------------------------------------------------


def kernels(setting: Setting, attempt: Attempt) -> None:
    """Bandwidth, attention backends, acceptance, and a small recorded pass."""
    attempt("read_bytes_per_s", lambda: bandwidth(setting))
    attempt("device acceptance", lambda: acceptance(setting))
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    for backend in ("triton", "split", "masked"):
        for name, dtype in dtypes.items():
            attempt(f"attention {backend} {name}", lambda b=backend, d=dtype: attention(setting, b, d))
    for name, dtype in dtypes.items():
        attempt(f"recorded pass {name}", lambda d=dtype: small_passes(setting, d))
    if not setting.dry:  # compiling takes long, so it comes last
        attempt("attention flex bfloat16", lambda: attention(setting, "flex", torch.bfloat16))


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
        host = SamplingChooser(rule, seed)
        device = DeviceChooser(host)
        prompt = torch.from_numpy(rng.integers(0, vocab, (1, 200)))
        for turn in range(5):
            scaled = (logits * (1 + turn / 4)).to(torch.bfloat16)
            texts = RowText(prompt, 300), RowText(prompt, 300)
            expected = walk(tree, read_logits(scaled, 8), 0, host, texts[0], lambda *_: False)
            read = DeviceChooser(host).read(scaled, 0, tree, texts[1], 8)
            got = walk(tree, read, 0, device, texts[1], lambda *_: False)
            found["walks"] += 1
            found["different"] += got.emitted.tolist() != expected.emitted.tolist()
        text = RowText(prompt, 300)
        found["ms"][str(rule)] = setting.median_ms(lambda d=device, x=scaled, t=text: d.read(x, 0, tree, t, 8))
        found["ms"]["greedy"] = setting.median_ms(lambda x=scaled: read_logits(x, 8))
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PassMask]:
    """Random queries, keys and values of one pass, and its mask."""
    torch.manual_seed(0)
    tree = draft(nodes)
    rows = nodes + 1
    shapes = ((heads, rows), (kv_heads, prefix + rows), (kv_heads, prefix + rows))
    query, keys, values = (torch.randn(1, h, n, width, device=setting.device, dtype=dtype) for h, n in shapes)
    mask = PassMask(heads // kv_heads, dtype, torch.device(setting.device))
    mask.set(prefix, visible_rows(1, tree), row_depths(1, tree))
    return query, keys, values, mask


def dense_attention(query: Any, keys: Any, values: Any, mask: PassMask, rule: LayerRule) -> torch.Tensor:
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
    make, why = fast_verifier.try_build(
        model, probe(model, read_interface(model)), SpeculationConfig(static_pass="always")
    )
    if make is not None:
        setting.graph_maker(model)
    return {"static": why, "graphs": ""}


# --- conformance -----------------------------------------------------------------------------------------------------


def conformance(setting: Setting, attempt: Attempt) -> None:
    """Drafted against plain output of tiny models."""
    for family in FAMILIES[:2] if setting.dry else FAMILIES:
        for dtype in (torch.float32, torch.bfloat16):
            attempt(f"{family} {str(dtype)[6:]}", lambda family=family, dtype=dtype: compare(setting, family, dtype))


def compare(setting: Setting, family: str, dtype: torch.dtype) -> dict[str, Any]:
    """Whether outputs are the same, by kind of pass; where not, at which token and how near the best two are there."""
    common: dict[str, Any] = dict(  # noqa: C408
        vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.2, eos_token_id=None,
        pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    common |= {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "mixtral" else {}
    common |= {"sliding_window": 16} if family in ("mistral", "gemma3_text") else {}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **common)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(setting.device)
    ids = torch.tensor([[3 + (i * 37 + 11) % 190 for i in range(40)]], device=setting.device)
    options = {"max_new_tokens": 32 if setting.dry else 96, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    rs.accelerate(model, nodes=24, static_pass="always")
    static, interface = model.speculation._make_verifier, read_interface(model)
    found: dict[str, Any] = {"static": isinstance(static(), fast_verifier.StaticVerifier)}
    prediction = plain[0, 40:].tolist()
    for kind in ("own forward", "static", "graphs"):
        if kind == "own forward":
            model.speculation._make_verifier = lambda: HFVerifier(model, interface)
        elif not found["static"]:
            continue
        else:
            model.speculation._make_verifier = static if kind == "static" else setting.graph_maker(model)
        ours = model.generate(ids, prediction=prediction, **options)
        found[kind] = {
            "same": bool(torch.equal(plain, ours)),
            "tokens_per_pass": model.speculation.last.tokens_per_pass,
        }
        if not found[kind]["same"]:
            at = int((plain != ours).nonzero()[0, 1])
            top = model(plain[:, :at]).logits[0, -1].float().topk(2).values
            found[kind] |= {"position": at, "gap": round(float(top[0] - top[1]), 5), "top": round(float(top[0]), 3)}
    rs.restore(model)
    return found


# --- a model's passes and decoding -----------------------------------------------------------------------------------


def model(setting: Setting, attempt: Attempt, size: str) -> None:
    """Cost curves and decoding of one size."""
    target = build(size, max(setting.context), setting.device, torch.bfloat16)
    attempt("weight_bytes", lambda: sum(p.nbytes for p in target.parameters()))
    makers: dict[str, Callable[[], Verifier]] = {}

    def record() -> dict[str, Any]:
        began = time.perf_counter()
        finding = probe(target, read_interface(target))
        make, why = fast_verifier.try_build(target, finding, SpeculationConfig(static_pass="always"))
        if make is not None:
            makers["static"] = make
        return {"why_not": why, "recording_s": round(time.perf_counter() - began, 1)}

    def graphs() -> str:
        makers["static graphs"] = setting.graph_maker(target)
        return "agree"

    attempt("static pass", record)
    if "static" in makers:
        attempt("graphs", graphs)
    for context in reversed(setting.context):
        attempt(f"curve {context} plain", lambda context=context: {"0": plain_pass(setting, target, context)})
        for kind in reversed(makers):
            attempt(
                f"curve {context} {kind}",
                lambda context=context, kind=kind: curve(setting, target, makers[kind], context),
            )
    answers = list(recorded_answers(setting, target.config.vocab_size))
    attempt("decode generate", lambda: baseline(setting, target, answers))
    for kind in reversed(makers):
        attempt(f"decode ours ({kind})", lambda kind=kind: ours(setting, target, makers[kind], answers))
    attempt("decode prompt lookup", lambda: baseline(setting, target, answers, prompt_lookup_num_tokens=10))
    attempt("gpu_gb", lambda: round(torch.cuda.max_memory_allocated() / 2**30, 1) if setting.on_gpu else 0.0)


def compiled(setting: Setting, attempt: Attempt, size: str) -> None:
    """`generate` with a static compiled cache, which compiles first."""
    target = build(size, max(setting.context), setting.device, torch.bfloat16)
    answers = list(recorded_answers(setting, target.config.vocab_size))[:1]
    attempt("decode static compiled cache", lambda: baseline(setting, target, answers, cache_implementation="static"))


def started(setting: Setting, make: Callable[[], Verifier], target: Any, context: int) -> Verifier:
    """A verifier that has read a prompt."""
    prompt = torch.as_tensor((np.arange(context) * 7919 + 13) % 500, device=setting.device)[None]
    positions = torch.arange(context, device=setting.device)[None]
    verifier = make()
    kwargs = {"past_key_values": DynamicCache(config=target.config), "position_ids": positions}
    verifier.start(VerifierInputs(prompt, kwargs, max_length=context + 512))
    verifier.forward(prompt[0].cpu().numpy().astype(np.int32))
    verifier.commit(NOTHING)
    return verifier


def curve(setting: Setting, target: Any, make: Callable[[], Verifier], context: int) -> dict[str, float]:
    """Milliseconds of a pass by number of drafted nodes; the text grows by the root with every pass."""
    verifier = started(setting, make, target, context)
    times = {}

    def run(tree: DraftTree) -> None:
        verifier.forward(ROOT, tree if len(tree) else None)
        verifier.commit(NOTHING)

    for nodes in setting.nodes:
        tree = draft(nodes)
        times[str(nodes)] = setting.median_ms(lambda tree=tree: run(tree))
    verifier.finish()
    gc.collect()
    return times


def plain_pass(setting: Setting, target: Any, context: int) -> float:
    """Milliseconds of a one-token pass with the arguments plain `generate` gives it."""
    cache = DynamicCache(config=target.config)
    prompt = torch.as_tensor((np.arange(context) * 7919 + 13) % 500, device=setting.device)[None]
    target(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def run() -> None:
        length = cache.get_seq_length()
        mask = torch.ones((1, length + 1), dtype=torch.long, device=setting.device)
        positions = torch.tensor([[length]], device=setting.device)
        target(
            prompt[:, :1], past_key_values=cache, use_cache=True, attention_mask=mask, position_ids=positions,
            logits_to_keep=1,
        )  # fmt: skip

    return setting.median_ms(run)


class TraceDriven:
    """A verifier whose target is made to say the recorded text, after all its work is done."""

    def __init__(self, inner: Verifier, trace: torch.Tensor) -> None:
        self._inner, self._trace, self._past = inner, trace, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self, inputs: VerifierInputs) -> None:
        """Begin at the prompt."""
        self._past = 0
        self._inner.start(inputs)

    def forward(self, root_ids: Any, tree: Any = None, *, keep: int = 1, want_hidden: Any = None) -> VerifierOutput:
        """Run the pass, then make the recorded token of every row's position the most probable one."""
        out = self._inner.forward(root_ids, tree, keep=keep, want_hidden=want_hidden)
        self._roots = len(root_ids)
        last = self._past + self._roots
        after = np.arange(last - keep + 1, last + 1)
        if tree is not None and len(tree):
            after = np.concatenate([after, last + tree.depth])
        at = torch.from_numpy(after).clamp(max=len(self._trace) - 1).to(out.logits.device, non_blocking=True)
        with torch.inference_mode():
            return VerifierOutput(out.logits.scatter(1, self._trace[at][:, None], SURE), out.hidden)

    def commit(self, path: Any) -> None:
        """Go on behind the accepted nodes."""
        self._past += self._roots + len(path)
        self._inner.commit(path)


def told(trace: torch.Tensor) -> Callable[..., Any]:
    """A logits processor that makes the recorded token the most probable one."""

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        at = min(input_ids.shape[1], len(trace) - 1)
        return scores.index_fill(1, trace[at : at + 1], SURE)

    return process


def traces_of(setting: Setting, answers: list[tuple[list[int], list[int]]]) -> Iterator[tuple[Any, Any, int]]:
    """(trace on the device, prompt, number of new tokens) of every answer."""
    for prompt, output in answers:
        trace = torch.tensor(prompt + output, device=setting.device)
        yield trace, trace[None, : len(prompt)], len(output)


def baseline(setting: Setting, target: Any, answers: Any, **extra: Any) -> dict[str, Any]:
    """Tokens per second of the model's own `generate`."""
    tokens, seconds, same = 0, 0.0, True
    for trace, prompt, count in traces_of(setting, answers):
        options = {"do_sample": False, "pad_token_id": 0, "logits_processor": [told(trace)], **extra}
        if not tokens:
            target.generate(prompt, max_new_tokens=min(16, count), **options)  # sets up, and compiles if it does
        setting.wait()
        began = time.perf_counter()
        out = target.generate(prompt, max_new_tokens=count, min_new_tokens=count, **options)
        setting.wait()
        seconds += time.perf_counter() - began
        tokens += count
        same &= bool(torch.equal(out[0, : len(trace)], trace))
    return {"tokens_per_s": round(tokens / seconds, 2), "ms_per_token": round(seconds / tokens * 1e3, 3), "same": same}


def ours(setting: Setting, target: Any, make: Callable[[], Verifier], answers: Any) -> dict[str, Any]:
    """Tokens per second of an accelerated model, and where the time goes."""
    rs.accelerate(target, static_pass="always")
    spent = dict.fromkeys(("draft_ms", "verify_ms", "commit_ms", "learn_ms"), 0.0)
    tokens = passes = nodes = 0
    seconds, same = 0.0, True
    try:
        for turn in ("warm", "timed"):
            tokens = passes = nodes = 0
            seconds = 0.0
            spent = dict.fromkeys(spent, 0.0)
            for trace, prompt, count in traces_of(setting, answers if turn == "timed" else answers[:1]):
                target.speculation._make_verifier = lambda trace=trace: TraceDriven(make(), trace)
                setting.wait()
                began = time.perf_counter()
                out = target.generate(prompt, max_new_tokens=count, do_sample=False, pad_token_id=0)
                setting.wait()
                seconds += time.perf_counter() - began
                last = target.speculation.last
                tokens, passes, nodes = tokens + count, passes + last.passes, nodes + last.nodes
                spent = {name: value + getattr(last, name) for name, value in spent.items()}
                same &= bool(torch.equal(out[0, : len(trace)], trace))
            target.speculation.forget()
    finally:
        rs.restore(target)
    per_pass = {name: round(value / passes, 4) for name, value in spent.items()}
    outside = round(sum(per_pass.values()) - per_pass["verify_ms"], 4)
    rate = {"tokens_per_s": round(tokens / seconds, 2), "tokens_per_pass": round(tokens / passes, 3)}
    return {**rate, "nodes_per_pass": round(nodes / passes, 1), "outside_ms": outside, "same": same, **per_pass}


def recorded_answers(setting: Setting, vocab: int) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, output) token ids; without a trace, pieces of the library's source, one behind a long prompt."""
    from tokenizers import Tokenizer

    package = Path(rs.__file__).parent
    tokenizer = Tokenizer.from_file(str(package / "reference" / "tokenizer.json"))

    def read(text: Any) -> list[int]:
        ids = text if isinstance(text, list) else tokenizer.encode(text).ids
        return [int(token) % vocab for token in ids]

    if setting.trace is not None:
        for line in Path(setting.trace).read_text(encoding="utf-8").splitlines()[: 1 if setting.dry else 4]:
            record = json.loads(line)
            yield read(record["prompt"])[-max(setting.context) :], read(record["output"])[: setting.new_tokens]
        return
    names = ("decoding/hf.py", "decoding/loop.py", "decoding/speculation.py")
    pieces = [read((package / name).read_text(encoding="utf-8")) for name in names]
    whole = [token for piece in pieces for token in piece]
    new, longest = setting.new_tokens, max(setting.context)
    for ids, start in ((whole, min(longest - 256, len(whole) - new)), *((piece, 512) for piece in pieces)):
        start = max(min(start, len(ids) - new, 40 if setting.dry else start), 1)
        yield ids[:start], ids[start : start + new]
        if setting.dry:
            return
