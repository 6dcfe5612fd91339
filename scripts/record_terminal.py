"""Terminal recording of the README: one real race of plain `generate` and this library, line by line.

    python scripts/record_terminal.py [--new-tokens 120]

The bundled model continues, greedy, that one of six unseen Python files whose answer repeats itself least (is the
hardest to compress); of two runs each way the second is recorded and printed as one JSON object (`scripts/reproduce
terminal`). `make docs` draws docs/terminal.svg from it: the same data gives the same bytes.
"""

from __future__ import annotations

import zlib
from itertools import accumulate, chain
from time import perf_counter
from typing import Any

import harness
from transformers.generation.streamers import BaseStreamer

import retrieve_spec as rs
from retrieve_spec.bench.workloads import builtin
from retrieve_spec.reference_model import load_model

FILES = 6


class Clock(BaseStreamer):
    """A streamer that notes when tokens came; the first call brings the prompt."""

    def __init__(self) -> None:
        self.began, self.pieces, self.times = perf_counter(), [], []  # type: tuple[float, list[list[int]], list[float]]

    def put(self, value: Any) -> None:
        """Take new token ids."""
        self.pieces.append(value.flatten().tolist())
        self.times.append(perf_counter() - self.began)

    def end(self) -> None:
        """Nothing is left to do."""

    def lines(self, tokenizer: Any) -> list[tuple[str, float]]:
        """Every line, with the time of its last token."""
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in accumulate(self.pieces[1:])]
        ends = [(text.count("\n"), at) for text, at in zip(texts, self.times[1:], strict=True)]
        lines = texts[-1].expandtabs(4).split("\n")
        return [(line, next((at for n, at in ends if n > i), self.times[-1])) for i, line in enumerate(lines)]


def record(new_tokens: int) -> dict[str, Any]:
    """Both ways over one file, each once to warm up."""
    model, tokenizer = load_model("reference", dtype="float32", device="cpu")

    def run(prompt: Any) -> Clock:
        clock = Clock()
        inputs = tokenizer(prompt.turns[0], return_tensors="pt").to(model.device)
        model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, streamer=clock)
        return clock

    def variety(prompt: Any) -> float:
        text = tokenizer.decode(list(chain(*run(prompt).pieces[1:])), skip_special_tokens=True).encode()
        return len(zlib.compress(text, 9)) / len(text)

    prompt = max(builtin(FILES, ("unseen",)), key=variety)
    runs, said = [], []
    for title in ("plain generate", "retrieve_spec"):
        if runs:
            rs.accelerate(model, tokenizer)
        run(prompt)
        clock = run(prompt)
        said.append(list(chain(*clock.pieces[1:])))
        lines = clock.lines(tokenizer)
        runs.append({"title": title, "tokens": len(said[-1]), "seconds": clock.times[-1], "lines": lines})
    last = model.speculation.last
    same = said[0] == said[1]
    return {"file": prompt.name, "runs": runs, "identical": same, "tokens_per_pass": last.tokens_per_pass}


def main() -> None:
    """Print a recording."""
    harness.run(lambda options: record(options.new_tokens), __doc__, new_tokens=120)


if __name__ == "__main__":
    main()
