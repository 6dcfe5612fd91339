"""Edit predictions: prompts in which editors mark an excerpt and the cursor, and ask for the excerpt as it will be."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CURSOR = re.compile(r"<\|(?:user_cursor_is_here|user_cursor|cursor)\|>")


@dataclass(frozen=True, slots=True)
class EditFormat:
    """How one family of models is asked for an edit.

    Attributes
    ----------
    opens, close
        What stands in front of the excerpt, as an expression, and after it.
    begins
        What an answer has in front of the excerpt.
    """

    opens: re.Pattern[str]
    close: str
    begins: str = ""


FORMATS = (
    EditFormat(re.compile(r"<\|editable_region_start\|>\n?"), "<|editable_region_end|>", "<|editable_region_start|>\n"),
    EditFormat(re.compile(r"^<<<<<<< CURRENT\n", re.MULTILINE), "=======\n"),
    EditFormat(re.compile(r"<\|file_sep\|>current/[^\n]*\n"), "<|file_sep|>updated/"),
)
"""Those of Zeta, its second version, and Sweep's next-edit models."""


@dataclass(frozen=True, slots=True)
class Edit:
    """An excerpt that is to be edited.

    Attributes
    ----------
    before
        What stands left of the cursor in it, or all of it.
    expected
        The answer that would leave it as it is.
    """

    before: str
    expected: str


def find_edit(prompt: str) -> Edit | None:
    """Return the excerpt that a prompt asks to edit; None where it asks for something else."""
    for fmt in FORMATS:
        end = prompt.rfind(fmt.close)
        begun = list(fmt.opens.finditer(prompt, 0, end)) if end >= 0 else []
        if begun:
            excerpt = prompt[begun[-1].end() : end]
            cursor = _CURSOR.search(excerpt)
            return Edit(excerpt[: cursor.start()] if cursor else excerpt, fmt.begins + _CURSOR.sub("", excerpt))
    return None
