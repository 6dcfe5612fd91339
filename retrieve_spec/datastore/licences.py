"""Licence rule: find the licence of a file, and decide whether it is allowed.

A file's ``SPDX-License-Identifier`` lines come first, then the licence files of the nearest folder that has any, up to
the top of the checkout or source, then the licence that the user states for the whole source. The package identify
recognises licences by their texts. If any of these is present but not understood, the licence is unknown: there is no
guessing.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from identify.identify import license_id, tags_from_filename
from identify.vendor.licenses import LICENSES
from license_expression import ExpressionError, get_spdx_licensing

from retrieve_spec.datastore.git_rules import Reason, checkout_of
from retrieve_spec.errors import BuildError

_HEAD_CHARS = 8192
_MOST_BYTES = 256 << 10
_SPDX = re.compile(
    r"^[^\w\n\"'`]*SPDX-License-Identifier:[ \t]*(.*?)(?:[ \t]*\*\))?[^\w+)\n]*$", re.IGNORECASE | re.MULTILINE
)
_QUOTES = re.compile(r'"""|\'\'\'|`+')
_LICENCE_FILE = re.compile(
    r"(?:licen[cs]es?|copying\d*|unlicense|eula)(?:[-_. ].*)?|.*[-_.]licen[cs]e(?:\.(?:txt|md|rst|html|rtf))?",
    re.IGNORECASE,
)
"""Names of licence files. If any of them is not understood, the licence is unknown."""
_PROSE = {"text", "plain-text", "markdown", "rst", "html"}
_EITHER = {"MIT", "Apache-2.0"}
"""Licences that are customarily alternatives if both files are present; of all others, both apply."""
_STATED = {
    "mit license": "MIT",
    "apache software license": "Apache-2.0",
    "isc license (iscl)": "ISC",
    "python software foundation license": "PSF-2.0",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "the unlicense (unlicense)": "Unlicense",
    "zlib/libpng license": "Zlib",
}
"""Common names of licences by SPDX identifier."""
_COPYRIGHT = re.compile(r"^\s*(?:copyright|\(c\)) .*$", re.IGNORECASE | re.MULTILINE)
_MEANING = frozenset(
    ["academic", "agreement", "any", "attribution", "ban", "charge", "commercial", "commercially", "consent",
     "derivative", "distribute", "education", "educational", "ethical", "evaluation", "evil", "except", "excluding",
     "exclusively", "fee", "forbidden", "free", "good", "government", "harm", "hereby", "internal", "limited", "may",
     "merge", "military", "modify", "must", "no", "non", "noncommercial", "nonprofit", "not", "only", "payment",
     "permitted", "person", "personal", "prior", "private", "profit", "prohibited", "provided", "publish", "purpose",
     "purposes", "redistribute", "research", "restricted", "restriction", "revocable", "revoke", "royalty", "sell",
     "shall", "solely", "sublicense", "terminate", "unless", "use", "without", "written"]
)  # fmt: skip
"""Words that decide what a licence allows: a text with more or fewer of them is another licence."""
UNKNOWN = ""
_spdx = cache(get_spdx_licensing)


def allow_list(names: Iterable[str]) -> tuple[str, ...]:
    """Return the SPDX identifiers of allowed licences from names, each of which may be several separated by commas.

    Raises
    ------
    BuildError
        A name is not an SPDX identifier.
    """
    found = []
    for name in (part.strip() for given in names for part in given.split(",")):
        if not name:
            continue
        known = canonical(name)
        if not known or len(_symbols(known)) > 1:
            remedy = "Look it up at https://spdx.org/licenses and give each licence by itself."
            raise BuildError("SPDX identifiers as licences, as MIT,Apache-2.0", repr(name), remedy)
        found.append(known)
    return tuple(dict.fromkeys(found))


def canonical(expression: str) -> str:
    """Return an SPDX expression in canonical form, or `UNKNOWN`; GNU licences get their newer names."""
    try:
        parsed = _spdx().parse(_STATED.get(expression.lower(), expression), validate=True, strict=True)
    except ExpressionError:
        return UNKNOWN
    return UNKNOWN if parsed is None else str(parsed)


def _symbols(expression: str) -> list[Any]:
    """Return the licences of an expression, each with its exception."""
    found: list[Any] = _spdx().license_symbols(expression, decompose=False)
    return found


def allows(allowed: Sequence[str], expression: str) -> bool:
    """Whether a canonical SPDX expression is satisfied by the allowed licences.

    An exception only adds permissions, and "or later" includes the version it names.
    """
    spdx = _spdx()
    values = {one: spdx.TRUE if _is_allowed(allowed, one) else spdx.FALSE for one in _symbols(expression)}
    return expression != UNKNOWN and bool(spdx.parse(expression).subs(values).simplify() == spdx.TRUE)


def _is_allowed(allowed: Sequence[str], licence: Any) -> bool:
    name = getattr(licence, "license_symbol", licence).key
    return not {str(licence), name, name.removesuffix("-or-later") + "-only"}.isdisjoint(allowed)


def own_licence(text: str) -> str | None:
    """Return the licence of a text's own SPDX lines: `UNKNOWN` if not understood, None without any."""
    head = text[:_HEAD_CHARS]
    found = [canonical(line[1]) for line in _SPDX.finditer(head) if not _is_quoted(head[: line.start()])]
    return _all_of(found) if found else None


def _is_quoted(before: str) -> bool:
    """Whether the position after a text is inside a string or a block of code."""
    opened, start = "", 0
    for quotes in _QUOTES.finditer(before):
        if not opened:
            opened, start = quotes[0], quotes.start()
        elif quotes[0] == opened:
            opened = ""
    return bool(opened) and re.search(r"^\s*\w", before[:start], re.MULTILINE) is not None


def _all_of(found: Sequence[str], join: str = " AND ") -> str:
    if UNKNOWN in found:
        return UNKNOWN
    return str(_spdx().parse(join.join(f"({one})" for one in found)).simplify())


def is_licence_file(name: str) -> bool:
    """Whether a file is a licence file by its name, and is neither code nor data."""
    return _LICENCE_FILE.fullmatch(name) is not None and tags_from_filename(name) <= _PROSE


class LicenceRule:
    """Finds the licences of a folder's files, and decides whether they are allowed.

    Parameters
    ----------
    root
        The folder, resolved; outside a checkout, nothing above it is read.
    allowed
        From `allow_list`.
    stated
        Licence of files that have none of their own.
    """

    def __init__(self, root: Path, allowed: Sequence[str], stated: str = "") -> None:
        self.allowed = tuple(allowed)
        self._root, self._stated = root, canonical(stated)
        self._folders: dict[Path, str | None] = {}

    def licence(self, path: Path | None, own: str | None) -> str:
        """Return a file's licence; `own` is its `own_licence`, and texts that are not files have no path."""
        if own is None and path is not None:
            own = self._nearest(path.parent)
        return self._stated if own is None else own

    def refuses(self, expression: str) -> Reason | None:
        """Return why a text under a licence may not enter, None if it may."""
        if allows(self.allowed, expression):
            return None
        return Reason.LICENCE if expression else Reason.NO_LICENCE

    def _nearest(self, folder: Path) -> str | None:
        """Return the licence by the licence files of a folder, or of its nearest parent that has any; else None."""
        if folder not in self._folders:
            top = checkout_of(folder) or self._root
            said = _folder_licence(folder, top)
            self._folders[folder] = said if said is not None or folder == top else self._nearest(folder.parent)
        return self._folders[folder]


def _folder_licence(folder: Path, top: Path) -> str | None:
    """Return the licence by all licence files of one folder, None without any."""
    try:
        names = sorted(filter(is_licence_file, os.listdir(folder)))
    except OSError:
        return None
    found = [_file_licence(folder / name, top) for name in names if not (folder / name).is_dir()]
    if not found:
        return None
    return _all_of(found, " OR " if set(found) == _EITHER else " AND ")


def _file_licence(path: Path, top: Path) -> str:
    """Return the licence whose text a file contains; links inside the checkout are followed."""
    try:
        place = path.resolve(strict=True)
        if not place.is_file() or place.stat().st_size > _MOST_BYTES or not place.is_relative_to(top):
            return UNKNOWN
        found = license_id(str(place)) or UNKNOWN
        return canonical(found) if found and _means(place.read_text("utf-8"), _texts()[found]) else UNKNOWN
    except (OSError, ValueError, RuntimeError):
        return UNKNOWN


@cache
def _texts() -> dict[str, str]:
    """Return the texts of licences by identifier."""
    return dict(LICENSES)


def _means(text: str, licence: str) -> bool:
    """Whether a text that is similar to a licence's has the same decisive words; names may differ."""
    counts = (Counter(re.findall(r"[a-z]+", _COPYRIGHT.sub("", each).lower())) for each in (text, licence))
    ours, wanted = ({word: count[word] for word in _MEANING} for count in counts)
    return ours == wanted
