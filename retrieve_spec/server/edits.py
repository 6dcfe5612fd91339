"""Edit predictions: editors mark an excerpt and the cursor in the prompt, and ask for the edited excerpt."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CURSOR = re.compile(r"<\|(?:user_cursor_is_here|user_cursor|cursor)\|>")


@dataclass(frozen=True, slots=True)
class EditFormat:
    """How one family of models marks the excerpt to edit.

    Attributes
    ----------
    opens, close
        Regular expression for the text before the excerpt, and the text after it.
    begins
        Text before the excerpt in an answer.
    """

    opens: re.Pattern[str]
    close: str
    begins: str = ""


FORMATS = (
    EditFormat(re.compile(r"<\|editable_region_start\|>\n?"), "<|editable_region_end|>", "<|editable_region_start|>\n"),
    EditFormat(re.compile(r"^<<<<<<< CURRENT\n", re.MULTILINE), "=======\n"),
    EditFormat(re.compile(r"<\|marker_1\|>\n"), "<|marker_", "<|marker_1|>\n"),
    EditFormat(re.compile(r"<\|file_sep\|>current/[^\n]*\n"), "<|file_sep|>updated/"),
)
"""The formats of Zeta, of its second version, of those that number blocks (2.1, 3), and of Sweep's next-edit models."""


@dataclass(frozen=True, slots=True)
class Edit:
    """An excerpt to edit.

    Attributes
    ----------
    before
        Its text before the cursor, or all of it.
    expected
        The answer that would leave it unchanged.
    """

    before: str
    expected: str


def find_edit(prompt: str) -> Edit | None:
    """Return the excerpt that a prompt asks to edit, or None."""
    for fmt in FORMATS:
        end = prompt.rfind(fmt.close)
        begun = list(fmt.opens.finditer(prompt, 0, end)) if end >= 0 else []
        if begun:
            excerpt = prompt[begun[-1].end() : end]
            cursor = _CURSOR.search(excerpt)
            return Edit(excerpt[: cursor.start()] if cursor else excerpt, fmt.begins + _CURSOR.sub("", excerpt))
    return None
