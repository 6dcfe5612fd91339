"""The README's terminal recording: one real race of plain `generate` and this library, drawn as an animated SVG.

    python scripts/record_terminal.py [--new-tokens 120]

The bundled model continues, greedy, that one of six unseen Python files whose answer repeats itself least (is the
hardest to compress); of two runs each way the second is recorded, line by line, and printed as one JSON object
(`scripts/reproduce terminal`). `make docs` draws docs/terminal.svg from it: the same data gives the same bytes. It asks
nobody for a font, follows light and dark, and shows its last frame where a reader wants no motion.
"""

from __future__ import annotations

import zlib
from html import escape
from time import perf_counter
from typing import Any

import harness

COLUMNS, ROWS = 54, 16
"""Of a pane; longer lines are cut, later lines are not shown."""
FILES = 6
_CHAR, _LINE, _LEFT, _TOP = 7.8, 19, 18, 76
_PANE = COLUMNS * _CHAR + 2 * _LEFT
_STYLE = """\
text{font:13px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;fill:#1f2328}
.bar,.rule{fill:#d1d9e0}.back{fill:#f6f8fa;stroke:#d1d9e0}.dim{fill:#59636e}.good{fill:#0a6b2d;font-weight:bold}
.late{animation:show 1ms both}@keyframes show{from{opacity:0}to{opacity:1}}
@media(prefers-reduced-motion:reduce){.late{animation:none}}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.back{fill:#151b23;stroke:#3d444d}.bar,.rule{fill:#3d444d}
.dim{fill:#9198a1}.good{fill:#3fb950}}"""


class _Clock:
    """A streamer that notes when tokens came; the first call brings the prompt."""

    def __init__(self) -> None:
        self.began, self.ids, self.times = perf_counter(), [], []  # type: tuple[float, list[int], list[float]]
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        """Take new token ids."""
        if self._prompt_seen:
            new = value.flatten().tolist()
            self.ids += new
            self.times += [perf_counter() - self.began] * len(new)
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is left to do."""

    def lines(self, tokenizer: Any) -> list[tuple[str, float]]:
        """Every line, with the time of its last token."""
        text = tokenizer.decode(self.ids, skip_special_tokens=True)
        ends = [
            tokenizer.decode(self.ids[:n], skip_special_tokens=True).count("\n") for n in range(1, len(self.ids) + 1)
        ]
        lines = text.expandtabs(4).split("\n")
        done = [
            next((at for breaks, at in zip(ends, self.times, strict=True) if breaks > i), self.times[-1])
            for i in range(len(lines))
        ]
        return list(zip(lines, done, strict=True))


def record(new_tokens: int) -> dict[str, Any]:
    """Both ways over one file, each once to warm up."""
    import retrieve_spec as rs
    from retrieve_spec.bench.workloads import builtin
    from retrieve_spec.reference_model import load_model

    model, tokenizer = load_model("reference", dtype="float32", device="cpu")

    def encode(prompt: Any) -> Any:
        return tokenizer(prompt.turns[0], return_tensors="pt").to(model.device)

    def variety(prompt: Any) -> float:
        inputs = encode(prompt)
        output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
        text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]).encode()
        return len(zlib.compress(text, 9)) / len(text)

    prompt = max(builtin(FILES, ("unseen",)), key=variety)
    inputs = encode(prompt)
    runs = []
    for title in ("plain generate", "retrieve_spec"):
        if title == "retrieve_spec":
            rs.accelerate(model, tokenizer)
        for _ in range(2):
            clock = _Clock()
            model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, streamer=clock)
        lines = clock.lines(tokenizer)
        runs.append(
            {"title": title, "tokens": len(clock.ids), "seconds": clock.times[-1], "lines": lines, "ids": clock.ids}
        )
    same = runs[0].pop("ids") == runs[1].pop("ids")
    last = model.speculation.last
    return {"file": prompt.name, "runs": runs, "identical": same, "tokens_per_pass": last.tokens_per_pass}


def draw(made: dict[str, Any]) -> str:
    """The SVG of a recording."""
    height = _TOP + ROWS * _LINE + 62
    width = 2 * _PANE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
        f'aria-label="{_said(made)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="back" x=".5" y=".5" width="{width - 1:.0f}" height="{height - 1}" rx="8"/>',
        *(f'<circle class="bar" cx="{20 + 18 * i}" cy="18" r="5"/>' for i in range(3)),
        _text(_LEFT + 60, 23, f"the bundled model continues {made['file']}", "dim"),
        f'<rect class="rule" x="{_PANE:.0f}" y="36" width="1" height="{_TOP + ROWS * _LINE - 40}"/>',
    ]
    for run, left in zip(made["runs"], (0.0, _PANE), strict=True):
        parts.append(_text(left + _LEFT, 56, run["title"], "dim"))
        for row, (line, at) in enumerate(run["lines"][:ROWS]):
            parts.append(_text(left + _LEFT, _TOP + 6 + row * _LINE, _cut(line), late=at))
        rate = f"{run['tokens']} tokens in {run['seconds']:.2f} s: {run['tokens'] / run['seconds']:.0f} tokens/s"
        parts.append(_text(left + _LEFT, _TOP + ROWS * _LINE + 14, rate, "good", run["seconds"]))
    slow, fast = (run["seconds"] for run in made["runs"])
    same = "the same tokens" if made["identical"] else "other tokens"
    told = f"{same}, {made['tokens_per_pass']:.1f} tokens per pass, {slow / fast:.1f} times as fast"
    parts.append(_text(_LEFT, height - 18, told, "", max(slow, fast)))
    return "\n".join([*parts, "</svg>", ""])


def _said(made: dict[str, Any]) -> str:
    seconds = " and ".join(f"{run['title']} takes {run['seconds']:.2f} s" for run in made["runs"])
    return escape(f"Recording of a terminal: {seconds} for {made['runs'][0]['tokens']} tokens", quote=True)


def _cut(line: str) -> str:
    printable = "".join(c if c.isprintable() else " " for c in line)
    return printable if len(printable) <= COLUMNS else printable[: COLUMNS - 1] + "…"


def _text(x: float, y: float, text: str, kind: str = "", late: float | None = None) -> str:
    classes = " ".join(filter(None, [kind, "late" if late is not None else ""]))
    style = "" if late is None else f' style="animation-delay:{late:.3f}s"'
    attribute = f' class="{classes}"' if classes else ""
    return f'<text x="{x:.0f}" y="{y}"{attribute}{style} xml:space="preserve">{escape(text)}</text>'


def main() -> None:
    """Print a recording."""
    harness.run(lambda options: record(options.new_tokens), __doc__, new_tokens=120)


if __name__ == "__main__":
    main()
