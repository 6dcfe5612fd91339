"""Prose linter: odd or empty phrases in pages and in the text of the package, each with what to write instead.

    python scripts/prose.py    # exit 1 and name the lines

The list is short on purpose: a phrase enters it when a reader had to read a sentence twice.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTEAD = {
    r"(?:is|are) told(?! apart)": "gets, learns, is known by, or is informed of",
    r"[Mm]end(?:s|ed)?\b": "repair, correct",
    r"(?:can|cannot|could) be had": "is (not) available",
    r"(?:has|have) \w+ of (?:its|their) own\b": "has its own",
    r"\bin order to\b": "to",
    r"\butili[sz]e[sd]?\b": "use",
    r"\bleverag(?:es?|ed|ing)\b": "use",
    r"\b(?:simply|obviously|of course|seamless(?:ly)?|blazing(?:ly)?|state-of-the-art)\b": "nothing",
}
"""Patterns of phrases, and what stands better there."""


def texts() -> Iterator[Path]:
    """Pages, and modules of the package: their docstrings, messages and comments."""
    yield from [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    yield from (ROOT / "retrieve_spec").rglob("*.py")


def found(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, phrase and what to write instead, of every phrase of the list in a text; it may run over a line's end."""
    flat = re.sub(r"\s", " ", text)
    for pattern, instead in INSTEAD.items():
        for match in re.finditer(pattern.replace(" ", " +"), flat):
            yield text.count("\n", 0, match.start()) + 1, match.group(), instead


def main() -> None:
    """Name the lines."""
    lines = [
        f"{path.relative_to(ROOT)}:{line}: {phrase!r}; write: {instead}"
        for path in texts()
        for line, phrase, instead in found(path.read_text(encoding="utf-8"))
    ]
    print("\n".join(lines), end="\n" if lines else "")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
