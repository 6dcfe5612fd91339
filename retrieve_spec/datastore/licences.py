"""Licence rule: under which licence a file stands, and whether that is one of those allowed.

A file's own ``SPDX-License-Identifier`` lines count first, then the licence files of the nearest folder that has
some, up to the top of the checkout or of the source, then what whoever builds says of the whole source. Licences are
recognised by their texts, which `identify` brings. Where any of these is there but not understood, the licence is
unknown: nothing enters by a guess.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from retrieve_spec.datastore.git_rules import Reason, checkout_of
from retrieve_spec.errors import BuildError

_HEAD_CHARS = 8192
_MOST_BYTES = 256 << 10
_SPDX = re.compile(
    r"^(?:dnl|rem|[^\w\n])*SPDX-License-Identifier:[ \t]*(.*?)[ \t]*(?:\*/|-->|[#%*]\}|\*\)|\"\"\"|''')?[ \t\r]*$",
    re.IGNORECASE | re.MULTILINE,
)
_LICENCE_FILE = re.compile(
    r"(?:licen[cs]es?|copying\d*|unlicense|eula)(?:[-_. ].*)?|.*[-_.]licen[cs]e(?:\.(?:txt|md|rst|html|rtf))?",
    re.IGNORECASE,
)
"""Every such file counts, as one that is not understood leaves the licence unknown, …"""
_NO_LICENCE_FILE = re.compile(
    r".*\.(?:py|js|ts|jsx|tsx|c|cc|cpp|h|hpp|go|rs|java|kt|rb|php|cs|swift|scala|sh|json|ya?ml|toml|xml|csv|lock)"
    r"|.*(?:3rd|third)[-_. ]?part(?:y|ies).*",
    re.IGNORECASE,
)
"""… but for code, data, and what speaks of others' parts."""
_EITHER = {"MIT", "Apache-2.0"}
"""Licences whose files side by side are alternatives, by custom; of any others both hold."""
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
UNKNOWN = ""
_WORD = re.compile(r"[a-z0-9]+")
_COPYRIGHT = re.compile(
    r"^[ \t]*(?:copyright\b(?!\s+(?:and|disclaimer|holders?|interest|laws?|licen[cs]es?|notices?|or|owners?|patent"
    r"|statement|to)\b)|\(c\)|©).*$|all rights reserved\.?",
    re.IGNORECASE | re.MULTILINE,
)
_END = "END OF TERMS AND CONDITIONS"
_BRACKETS = re.compile(r"\( ([^()]*) \)")
_YES, _NO = "yes", "no"
"""What a part of an expression in brackets comes to."""
_VERSIONED = re.compile(r"([AL]?GPL-\d\.\d|GFDL-\d\.\d)(\+?)")


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
        if not known or " OR " in known or " AND " in known:
            remedy = "Look it up at https://spdx.org/licenses and give each licence by itself."
            raise BuildError("SPDX identifiers as licences, as MIT,Apache-2.0", repr(name), remedy)
        found.append(known)
    return tuple(dict.fromkeys(found))


def canonical(expression: str) -> str:
    """An SPDX expression as it is usually written, or `UNKNOWN`; GNU licences by their newer names."""
    try:
        written = str(canonicalize_license_expression(_STATED.get(expression.lower(), expression)))
    except InvalidLicenseExpression:
        return UNKNOWN
    return " ".join(_newer(word) for word in written.replace("(", "( ").replace(")", " )").split())


def _newer(word: str) -> str:
    found = _VERSIONED.fullmatch(word)
    return word if found is None else f"{found[1]}-{'or-later' if found[2] else 'only'}"


def allows(allowed: Sequence[str], expression: str) -> bool:
    """Whether a text under a canonical SPDX expression may be taken under some of the allowed licences.

    An exception only adds permissions, and "or later" includes the version it names.
    """
    while inner := _BRACKETS.search(expression):
        expression = expression.replace(inner[0], _YES if allows(allowed, inner[1]) else _NO)
    sides = (side.split(" AND ") for side in expression.split(" OR "))
    return any(all(_is_allowed(allowed, licence) for licence in side) for side in sides)


def _is_allowed(allowed: Sequence[str], licence: str) -> bool:
    name, _, exception = licence.partition(" WITH ")
    names = {name, name.removesuffix("-or-later") + "-only"}
    names |= {f"{one} WITH {exception}" for one in names}
    return licence == _YES or not names.isdisjoint(allowed)


def own_licence(text: str) -> str | None:
    """Expression of a text's own SPDX lines, `UNKNOWN` where they are not understood, None without any."""
    found = [canonical(line) for line in _SPDX.findall(text[:_HEAD_CHARS])]
    return _all_of(found) if found else None


def _all_of(found: Sequence[str], join: str = " AND ") -> str:
    if UNKNOWN in found:
        return UNKNOWN
    different = sorted(set(found))
    return different[0] if len(different) == 1 else join.join(f"( {one} )" for one in different)


def is_licence_file(name: str) -> bool:
    """Whether a file says, by its name, under which licence others stand."""
    return _LICENCE_FILE.fullmatch(name) is not None and _NO_LICENCE_FILE.fullmatch(name) is None


@cache
def _texts() -> dict[tuple[str, ...], tuple[str, frozenset[str]]]:
    """Identifier, and words of the title, of the known licences by the words below that."""
    from identify.vendor.licenses import LICENSES

    found = {}
    for name, whole in LICENSES:
        for text in (whole, whole.partition(_END)[0] + _END):
            title, _, body = text.partition("\n")
            allowed = frozenset(_WORD.findall(f"the {title} license licence {name}".lower()))
            found[_words(body)] = canonical(name), allowed
            found.setdefault(_words(text), (canonical(name), frozenset()))
    return found


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(_COPYRIGHT.sub("", text).lower()))


def licence_of_text(text: str) -> str:
    """SPDX identifier of the licence that a text is, `UNKNOWN` for anything else.

    Copyright lines, spaces and a title in other words are free; whatever else differs makes another licence.
    """
    title, _, body = text.lstrip().partition("\n")
    name, known = _texts().get(_words(body), (UNKNOWN, frozenset[str]()))
    if known.issuperset(_words(title)):
        return name
    return _texts().get(_words(text), (UNKNOWN, known))[0]


class LicenceRule:
    """Which licences are allowed, and which one the files of some folders stand under.

    Parameters
    ----------
    roots
        Folders, resolved; outside of a checkout nothing above them is read.
    allowed
        From `allow_list`.
    stated
        Licence of what states none.
    """

    def __init__(self, roots: Sequence[Path], allowed: Sequence[str], stated: str = "") -> None:
        self.allowed = tuple(allowed)
        self._roots, self._stated = set(roots), canonical(stated) if stated else UNKNOWN
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
            checkout = checkout_of(folder)
            last = folder == checkout or folder.parent == folder or (checkout is None and folder in self._roots)
            said = _folder_licence(folder, checkout or self._root_of(folder))
            self._folders[folder] = said if said is not None or last else self._nearest(folder.parent)
        return self._folders[folder]

    def _root_of(self, folder: Path) -> Path:
        return next((root for root in self._roots if folder.is_relative_to(root)), folder)


def _folder_licence(folder: Path, top: Path) -> str | None:
    """What the licence files of one folder say together, None where there are none."""
    try:
        names = sorted(filter(is_licence_file, os.listdir(folder)))
    except OSError:
        return None
    files = [name for name in names if not (folder / name).is_dir()]
    if not files:
        return None
    found = [_file_licence(folder / name, top) for name in files]
    return _all_of(found, " OR " if set(found) == _EITHER else " AND ")


def _file_licence(path: Path, top: Path) -> str:
    """Licence whose text a file holds; a link is followed inside of the checkout."""
    try:
        place = path.resolve(strict=True)
        if not place.is_file() or place.stat().st_size > _MOST_BYTES or not place.is_relative_to(top):
            return UNKNOWN
        text = place.read_text("utf-8")
        own = own_licence(text)
        return licence_of_text(text) if own is None else own
    except (OSError, ValueError, RuntimeError):
        return UNKNOWN
