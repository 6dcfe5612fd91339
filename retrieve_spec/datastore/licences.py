"""Licence rule: the licence of a file, and whether it is allowed.

A file's own ``SPDX-License-Identifier`` lines count first, then the licence files of the nearest folder that has some,
up to the top of the checkout or of the source, then what the user states for the whole source. identify recognises
licences by their texts. Where any of these is there but not understood, the licence is unknown: nothing enters by a
guess.
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
"""Names of licence files. Each counts: one that is not understood leaves the licence unknown."""
_PROSE = {"text", "plain-text", "markdown", "rst", "html"}
_EITHER = {"MIT", "Apache-2.0"}
"""Licences whose files side by side are alternatives by custom; of any others both apply."""
_STATED = {
    "mit license": "MIT",
    "apache software license": "Apache-2.0",
    "isc license (iscl)": "ISC",
    "python software foundation license": "PSF-2.0",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "the unlicense (unlicense)": "Unlicense",
    "zlib/libpng license": "Zlib",
}
"""Names that packages give for one licence."""
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
"""Words that decide what a licence allows: where it has more or fewer of them, it is another one."""
UNKNOWN = ""
_spdx = cache(get_spdx_licensing)


def allow_list(names: Iterable[str]) -> tuple[str, ...]:
    """SPDX identifiers of the allowed licences, from names that may hold several with commas between.

    Raises
    ------
    BuildError
        When a name is no SPDX identifier.
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
    """An SPDX expression as it is usually written, or `UNKNOWN`; GNU licences by their newer names."""
    try:
        parsed = _spdx().parse(_STATED.get(expression.lower(), expression), validate=True, strict=True)
    except ExpressionError:
        return UNKNOWN
    return UNKNOWN if parsed is None else str(parsed)


def _symbols(expression: str) -> list[Any]:
    """Licences of an expression, each with its exception."""
    found: list[Any] = _spdx().license_symbols(expression, decompose=False)
    return found


def allows(allowed: Sequence[str], expression: str) -> bool:
    """Whether a text under a canonical SPDX expression may be taken under some of the allowed licences.

    An exception only adds permissions, and "or later" includes the version it names.
    """
    spdx = _spdx()
    values = {one: spdx.TRUE if _is_allowed(allowed, one) else spdx.FALSE for one in _symbols(expression)}
    return expression != UNKNOWN and bool(spdx.parse(expression).subs(values).simplify() == spdx.TRUE)


def _is_allowed(allowed: Sequence[str], licence: Any) -> bool:
    name = getattr(licence, "license_symbol", licence).key
    return not {str(licence), name, name.removesuffix("-or-later") + "-only"}.isdisjoint(allowed)


def own_licence(text: str) -> str | None:
    """Expression of a text's own SPDX lines, `UNKNOWN` where they are not understood, None without any."""
    head = text[:_HEAD_CHARS]
    found = [canonical(line[1]) for line in _SPDX.finditer(head) if not _is_quoted(head[: line.start()])]
    return _all_of(found) if found else None


def _is_quoted(before: str) -> bool:
    """Whether the position after some text is inside a string or a block of code."""
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
    """Whether a file is a licence file by its name; code and data of such a name are not."""
    return _LICENCE_FILE.fullmatch(name) is not None and tags_from_filename(name) <= _PROSE


class LicenceRule:
    """Which licences are allowed, and which licence the files of a folder have.

    Parameters
    ----------
    root
        The folder, resolved; outside of a checkout nothing above it is read.
    allowed
        From `allow_list`.
    stated
        Licence of files without one of their own.
    """

    def __init__(self, root: Path, allowed: Sequence[str], stated: str = "") -> None:
        self.allowed = tuple(allowed)
        self._root, self._stated = root, canonical(stated)
        self._folders: dict[Path, str | None] = {}

    def licence(self, path: Path | None, own: str | None) -> str:
        """Licence of a file whose own lines say `own` (`own_licence`); a text that is no file has no path."""
        if own is None and path is not None:
            own = self._nearest(path.parent)
        return self._stated if own is None else own

    def refuses(self, expression: str) -> Reason | None:
        """Why a text under this licence may not enter, None if it may."""
        if allows(self.allowed, expression):
            return None
        return Reason.LICENCE if expression else Reason.NO_LICENCE

    def _nearest(self, folder: Path) -> str | None:
        """What the licence files of a folder say, or of the nearest above it that has some; None where none has."""
        if folder not in self._folders:
            top = checkout_of(folder) or self._root
            said = _folder_licence(folder, top)
            self._folders[folder] = said if said is not None or folder == top else self._nearest(folder.parent)
        return self._folders[folder]


def _folder_licence(folder: Path, top: Path) -> str | None:
    """What the licence files of one folder say together, None where there are none."""
    try:
        names = sorted(filter(is_licence_file, os.listdir(folder)))
    except OSError:
        return None
    found = [_file_licence(folder / name, top) for name in names if not (folder / name).is_dir()]
    if not found:
        return None
    return _all_of(found, " OR " if set(found) == _EITHER else " AND ")


def _file_licence(path: Path, top: Path) -> str:
    """Return the licence whose text a file holds; a link is followed inside the checkout."""
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
    """Texts of licences by identifier."""
    return dict(LICENSES)


def _means(text: str, licence: str) -> bool:
    """Whether a text that is nearly that of a licence has the same decisive words; names may differ."""
    counts = (Counter(re.findall(r"[a-z]+", _COPYRIGHT.sub("", each).lower())) for each in (text, licence))
    ours, wanted = ({word: count[word] for word in _MEANING} for count in counts)
    return ours == wanted
