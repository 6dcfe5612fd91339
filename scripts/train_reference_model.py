"""Training of the bundled model from permissively licensed Python source: corpus, tokenizer, stream, weights.

What ships in `retrieve_spec/reference` was made by::

    python scripts/train_reference_model.py --out reference-model --roots SITE_PACKAGES...

on two CPU cores with bf16 instructions, in 100 minutes.

Training stops by the clock, so two machines get different weights from the same corpus; the corpus, the tokenizer and
the order of the stream depend on the installed packages alone: those of `--roots`, folders of site-packages, or of this
interpreter, at most `--per-package-mb` of each. `--budget SHAPE=MINUTES` names what is trained, several with commas.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib.metadata
import json
import random
import re
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL_TOKENS = [
    "<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<|im_start|>", "<|im_end|>",
]  # fmt: skip
HOLDOUT = frozenset((
    "flax", "httpx", "humanize", "marshmallow", "networkx", "peewee", "seaborn", "sortedcontainers", "structlog",
    "tabulate", "toolz", "typer", "uvicorn", "werkzeug",
))  # fmt: skip
PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation|Unlicense|Zlib|HPND)\b", re.IGNORECASE)
COPYLEFT = re.compile(r"\b(A?L?GPL\w*|GNU|MPL\S*|Mozilla|EPL|CC-BY-SA|Proprietary)\b", re.IGNORECASE)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES: dict[str, dict[str, int]] = {
    "tiny": dict(zip(SIZES, (32, 64, 1, 2, 1), strict=True)),
    "embedded": dict(zip(SIZES, (384, 1024, 6, 6, 2), strict=True)),
}
FILES_PER_BLOCK = 12  # files of one package that stay together when the stream is shuffled
TOKENIZER_FILES = 5000
FIM_SHARE = 0.4
LONG_SHARE = 0.2  # the last part of the training sees rows of --long-seq
VALIDATION_ROWS = 40


@dataclass(frozen=True, slots=True)
class Document:
    """One source file: the package it belongs to, its path there, its text."""

    package: str
    path: str
    text: str


def packages(roots: list[str]) -> Iterator[tuple[str, str, list[Path], Path]]:
    """The standard library, then every installed package whose licence allows it and that is not held out.

    Of each the name, the licence, its files and the folder that their paths begin at.
    """
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    own = sorted(p for p in stdlib.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts))
    yield "python-stdlib", "PSF", own, stdlib
    found = importlib.metadata.distributions(path=roots) if roots else importlib.metadata.distributions()
    for distribution in found:
        name = (distribution.metadata["Name"] or "").lower()
        data = distribution.metadata
        classifiers = [text for text in data.get_all("Classifier") or [] if text.startswith("License")]
        stated = [data.get("License-Expression"), (data.get("License") or "")[:300], *classifiers]
        licence = " ".join(text for text in stated if text)
        if name not in HOLDOUT and PERMISSIVE.search(licence) and not COPYLEFT.search(licence):
            listed = (Path(str(distribution.locate_file(f))) for f in distribution.files or [] if f.suffix == ".py")
            yield name, licence[:60], sorted(listed), Path(str(distribution.locate_file("")))


def collect(roots: list[str], per_package_mb: float) -> tuple[list[Document], dict[str, dict[str, Any]]]:
    """Read the corpus: unique files that look hand-written, at most so much of each package.

    Returns
    -------
    The documents, and per package how many characters were taken under which licence.
    """
    seen: set[bytes] = set()
    documents: list[Document] = []
    used: dict[str, dict[str, Any]] = {}
    for name, licence, files, base in packages(roots):
        random.Random(name).shuffle(files)
        size, mine = 0, []
        for path in files:
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if not 200 < len(text) < 300_000 or sum(len(line) > 400 for line in text.split("\n")) > 3:
                continue
            digest = hashlib.blake2b(re.sub(r"\s+", " ", text).encode(), digest_size=12).digest()
            if digest in seen:
                continue
            seen.add(digest)
            size += len(text)
            place = str(path.relative_to(base)) if path.is_relative_to(base) else "/".join(path.parts[-3:])
            mine.append(Document(name, place, text))
            if size > per_package_mb * 1e6:
                break
        if mine:
            used[name] = {"chars": size, "licence": licence}
            documents += sorted(mine, key=lambda document: document.path)
    return documents, used


def train_tokenizer(documents: list[Document], vocab: int, rng: random.Random) -> Tokenizer:
    """Byte-level BPE over a sample of the corpus; digits stay single, words keep their leading space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = rng.sample(documents, min(len(documents), TOKENIZER_FILES))
    tokenizer.train_from_iterator((document.text for document in sample), trainer)
    return tokenizer


def pack(documents: list[Document], tokenizer: Tokenizer, rng: random.Random) -> NDArray[np.int64]:
    """Join all documents to one stream (n,), blocks of a package shuffled, some cut into prefix, suffix and middle."""
    by_package: dict[str, list[Document]] = {}
    for document in documents:
        by_package.setdefault(document.package, []).append(document)
    blocks = [
        group[i : i + FILES_PER_BLOCK] for group in by_package.values() for i in range(0, len(group), FILES_PER_BLOCK)
    ]
    rng.shuffle(blocks)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    chunks = []
    for block in blocks:
        headers = tokenizer.encode_batch([document.path + "\n" for document in block])
        bodies = tokenizer.encode_batch([document.text for document in block])
        for header, body in zip(headers, bodies, strict=True):
            start = [ids["<|file_sep|>"], *header.ids]
            if rng.random() < FIM_SHARE and len(body.ids) > 64:
                chunks += [np.array(part, np.uint16) for part in fill_in_the_middle(start, body.ids, ids, rng)]
            else:
                chunks.append(np.array([*start, *body.ids, ids["<|endoftext|>"]], np.uint16))
    return np.concatenate(chunks).astype(np.int64)


def fill_in_the_middle(
    start: list[int], body: list[int], ids: dict[str, int], rng: random.Random
) -> Iterator[list[int]]:
    """Cut one file into windows, each with a hole of at most 128 tokens that comes last."""
    at = 0
    while at < len(body):
        length = rng.randint(200, 900)
        window = body[at : at + length]
        at += length
        if len(window) < 32:
            yield [*start, *window, ids["<|endoftext|>"]]
            continue
        x, y = sorted(rng.sample(range(len(window)), 2))
        y = min(y, x + 128)
        prefix, middle, suffix = window[:x], window[x:y], window[y:]
        holed = [ids["<|fim_prefix|>"], *prefix, ids["<|fim_suffix|>"], *suffix, ids["<|fim_middle|>"], *middle]
        yield [*start, *holed, ids["<|endoftext|>"]]


@dataclass
class Trainer:
    """One model being trained on one stream until its minutes are over."""

    model: LlamaForCausalLM
    stream: torch.Tensor  # (n,) int64, training part
    validation: torch.Tensor  # (rows, micro_tokens) int64
    args: argparse.Namespace
    step: int = 0
    tokens: int = 0
    start: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        split: tuple[list[Any], list[Any]] = [], []
        for name, parameter in self.model.named_parameters():
            split[parameter.dim() == 2 and "embed" not in name].append(parameter)
        others, matrices = split
        self.optimizers = [
            torch.optim.Muon(matrices, lr=1.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.peaks = (3e-3, 4e-3)
        self.body = self.model.model if self.args.no_compile else torch.compile(self.model.model)
        self.generator = torch.Generator().manual_seed(0)

    def batches(self, seq: int) -> Iterator[torch.Tensor]:
        """Rows of the stream (b, seq) in random order, for ever."""
        rows = self.stream[: len(self.stream) // seq * seq].view(-1, seq)
        size = max(1, self.args.micro_tokens // seq)
        while True:
            order = torch.randperm(len(rows), generator=self.generator)
            for i in range(0, len(rows) - size + 1, size):
                yield rows[order[i : i + size]]

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of rows (b, seq), in nats per token."""
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.body(input_ids=rows, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden[:, :-1])
        return torch.nn.functional.cross_entropy(logits.float().reshape(-1, logits.size(-1)), rows[:, 1:].reshape(-1))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Loss on the rows kept apart."""
        return float(np.mean([float(self.loss(row.view(-1, self.args.seq))) for row in self.validation]))

    def update(self, batches: Iterator[torch.Tensor], rate: float) -> float:
        """One optimizer step over `tokens_per_step` tokens; return its loss."""
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
        parts = max(1, self.args.tokens_per_step // self.args.micro_tokens)
        total = 0.0
        for _ in range(parts):
            rows = next(batches)
            loss = self.loss(rows) / parts
            loss.backward()
            total += float(loss.detach())
            self.tokens += rows.numel()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total

    def run(self, seconds: float, say: Any) -> None:
        """Train until the time is over or `max_steps` are done: warm up, hold, decay; long rows at the end."""
        batches, long = self.batches(self.args.seq), False
        while self.step < self.args.max_steps and (done := (time.time() - self.start) / seconds) < 1:
            if done > 1 - LONG_SHARE and not long:
                batches, long = self.batches(self.args.long_seq), True
                say(f"rows of {self.args.long_seq} tokens")
            rate = min(1.0, (self.step + 1) / 60) * (1.0 if done < 0.3 else max(0.02, (1 - done) / 0.7))
            loss = self.update(batches, rate)
            if self.step % 25 == 0 or self.step <= 3:
                speed = self.tokens / (time.time() - self.start)
                say(f"step {self.step} loss {loss:.3f} rate {rate:.2f} {speed:.0f} tokens/s, {done:.1%} of the time")


def build_model(tokenizer: Tokenizer, args: argparse.Namespace) -> LlamaForCausalLM:
    """An untrained Llama."""
    torch.manual_seed(0)
    end = tokenizer.token_to_id("<|endoftext|>")
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=args.long_seq,
        tie_word_embeddings=True,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=tokenizer.token_to_id("<|fim_pad|>"),
        initializer_range=0.02,
        **SHAPES[args.shape],
    )
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


def main() -> None:
    """Make the corpus and the tokenizer, then train."""
    sizes = {"vocab": 8192, "seq": 1024, "long_seq": 2048, "tokens_per_step": 16_384, "micro_tokens": 8192}
    limits = {"per_package_mb": 12.0, "shape": "embedded", "minutes": 100.0, "max_steps": 10**9, "threads": 2}
    places = {"out": Path("reference-model"), "roots": [""], "no_compile": False}
    args = harness.arguments(__doc__, **places, **sizes, **limits)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)

    def say(*parts: Any) -> None:
        print(time.strftime("%H:%M:%S"), *parts, flush=True)

    documents, used = collect(list(filter(None, args.roots)), args.per_package_mb)
    say(f"{len(documents)} files, {sum(len(d.text) for d in documents) / 1e6:.1f} MB, {len(used)} packages")
    rng = random.Random(0)
    tokenizer = train_tokenizer(documents, args.vocab, rng)
    tokenizer.save(str(args.out / "tokenizer.json"))
    data = pack(documents, tokenizer, rng)
    corpus = {"packages": used, "holdout": sorted(HOLDOUT), "tokens": len(data), "files": len(documents)}
    (args.out / "corpus.json").write_text(json.dumps(corpus, indent=1))
    say(f"{len(data)} tokens, vocabulary of {tokenizer.get_vocab_size()}")

    stream = torch.from_numpy(data)
    split = VALIDATION_ROWS * args.long_seq
    model = build_model(tokenizer, args).train()
    trainer = Trainer(model, stream[split:], stream[:split].view(-1, args.micro_tokens), args)
    trainer.run(args.minutes * 60, say)
    model.eval()
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(args.out)
    facts = {"val_loss": trainer.evaluate(), "steps": trainer.step, "tokens": trainer.tokens}
    facts |= {"params": sum(p.numel() for p in model.parameters()), "seconds": time.time() - trainer.start}
    (args.out / "training.json").write_text(json.dumps(facts))
    say("saved", facts)


if __name__ == "__main__":
    main()
