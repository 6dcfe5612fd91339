"""Tokenised files: reads what datatrove wrote as ``NAME.ds``, documents that are token ids already.

``NAME.ds`` holds the ids of all documents, little-endian, two or four bytes each; ``NAME.ds.index`` where each
document ends, in tokens, as uint64; ``NAME.ds.metadata`` says ``TOKENIZER|BYTES`` and how many tokens there are (files
of early versions leave the bytes out: two). All three are needed: ids mean nothing without the tokenizer they are of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from retrieve_spec.datastore.addresses import exists, open_file, size_of
from retrieve_spec.datastore.fingerprint import PREFIX, tokenizer_fingerprint
from retrieve_spec.errors import BuildError, TokenizerMismatchError

SUFFIX = ".ds"
INDEX, METADATA, LOSS = ".index", ".metadata", ".loss"
"""Ends of the names of the files that lie beside one; the last, weights for training, is not read."""
_END = 8
_BLOCK = 1 << 16
_AGAIN = "Copy the three files again, or write them again with datatrove."


@dataclass(frozen=True, slots=True)
class Layout:
    """What the files beside a tokenised file say: the tokenizer's name, bytes of an id, documents, tokens."""

    tokenizer: str
    width: int
    documents: int
    tokens: int


class TokenisedFileError(BuildError):
    """A tokenised file that does not belong to the files beside it, or is not what it was when it was listed."""


def pairs_of(names: Iterable[str]) -> dict[str, str]:
    """Of the files of a folder those that are tokenised, by their names, and each file beside one with whose it is."""
    ours = {name for name in names if SUFFIX in name[-len(SUFFIX + METADATA) :]}
    found = {name: name for name in ours if name.endswith(SUFFIX) and name + INDEX in ours}
    beside = {name + end: name for name in found for end in (INDEX, METADATA, LOSS)}
    return found | {name: of for name, of in beside.items() if name in ours}


def layout_of(location: str) -> Layout:
    """Check the sizes of a tokenised file and of those beside it against each other.

    Parameters
    ----------
    location
        Path or address of the ``.ds`` file.

    Raises
    ------
    TokenisedFileError
        When one is missing, or they do not belong together.
    """
    for end in ("", INDEX, METADATA):
        if not exists(location + end):
            expected = f"{location + end} beside {location}" if end else f"a tokenised file at {location}"
            raise TokenisedFileError(expected, "no such file", _AGAIN)
    with open_file(location + METADATA) as file:
        said = file.read(_BLOCK).decode("utf-8", "replace").splitlines()
    name, _, width = said[0].rpartition("|") if said and "|" in said[0] else (said[0] if said else "", "", "2")
    if width not in ("2", "4"):
        raise TokenisedFileError(f"2 or 4 bytes per token in {location + METADATA}", repr(width), _AGAIN)
    size, index = size_of(location), size_of(location + INDEX)
    tokens = 0
    if index >= _END:
        with open_file(location + INDEX) as file:
            file.seek(index // _END * _END - _END)
            tokens = int.from_bytes(file.read(_END), "little")
    if index % _END or size != tokens * int(width):
        expected = f"{tokens:,} tokens of {width} bytes in {location}, by its index of {index:,} bytes"
        raise TokenisedFileError(expected, f"{size:,} bytes", _AGAIN)
    if len(said) > 1 and said[1].strip() != str(tokens):
        raise TokenisedFileError(
            f"{tokens:,} tokens in {location + METADATA}, as the index says", repr(said[1]), _AGAIN
        )
    return Layout(name.strip(), int(width), index // _END, tokens)


def check_tokenizer(location: str, layout: Layout, tokenizer: Any) -> None:
    """Check that ids are those of the tokenizer of a store.

    A name that is a file or folder of this machine is compared by what the tokenizer does, another one by its last part
    with that of the tokenizer that was given: nothing is fetched because a file says so.

    Parameters
    ----------
    location, layout
        The file.
    tokenizer
        What `build_datastore` was given, or the fingerprint of a store's.

    Raises
    ------
    TokenizerMismatchError
        When they are of another one, or of one that cannot be compared.
    """
    name = layout.tokenizer
    given = str(tokenizer if isinstance(tokenizer, str | Path) else getattr(tokenizer, "name_or_path", ""))
    given = "" if given.startswith(PREFIX) else given
    if name and Path(name).expanduser().exists():
        same = tokenizer_fingerprint(name) == tokenizer_fingerprint(tokenizer)
    else:
        same = bool(name) and _called(name) == _called(given)
    if not same:
        raise TokenizerMismatchError(
            f"token ids of {_called(given) if given else 'the store’s tokenizer'} in {location}",
            f"ids of {name or 'a tokenizer that is not named'}",
            f"Build with that one as --tokenizer; if it is the same, write the path of its tokenizer.json and "
            f"`|{layout.width}` as the first line of {location + METADATA}.",
        )


def _called(name: str) -> str:
    """Last part of a tokenizer's name that tells it from others."""
    path = PurePosixPath(name.replace("\\", "/"))
    return (path.parent if path.name == "tokenizer.json" else path).name.lower()


def cuts(location: str, layout: Layout, most: int) -> Iterator[tuple[int, int, int]]:
    """Runs of documents, (first, end, bytes of their tokens), of at most so many bytes or one document each.

    Raises
    ------
    TokenisedFileError
        When the index does not rise.
    """
    first = begun = last = number = 0
    for last_before, number, end in _ends(location, 0, layout.documents):
        if end < last_before or end > layout.tokens:
            raise TokenisedFileError(
                f"ends of documents that rise to {layout.tokens:,} in {location + INDEX}", f"{end:,}", _AGAIN
            )
        if number > first and (end - begun) * layout.width > most:
            yield first, number, (last_before - begun) * layout.width
            first, begun = number, last_before
        last = end
    if layout.documents:
        yield first, layout.documents, (last - begun) * layout.width


def _ends(location: str, first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(end of the document before, number, end) of some documents."""
    with open_file(location + INDEX) as file:
        before = 0
        if first:
            file.seek(_END * (first - 1))
            before = int.from_bytes(file.read(_END), "little")
        for start in range(first, end, _BLOCK):
            content = file.read(_END * min(_BLOCK, end - start))
            block = np.frombuffer(content[: len(content) // _END * _END], "<u8")
            for number, at in enumerate(block.tolist(), start):
                yield before, number, at
                before = at


def documents(location: str, first: int, end: int, layout: Layout) -> Iterator[NDArray[np.uint32]]:
    """Token ids of the documents ``[first, end)``, (n,) uint32 each.

    Raises
    ------
    TokenisedFileError
        When the file is no longer what the layout says.
    """
    if layout_of(location) != layout:
        raise _changed(location)
    with open_file(location, listed=True) as file:
        at, following = -1, first
        for start, number, stop in _ends(location, first, end):
            if start != at:
                file.seek(start * layout.width)
            content = file.read(max(stop - start, 0) * layout.width)
            if len(content) != (stop - start) * layout.width:
                raise _changed(location)
            at, following = stop, number + 1
            yield np.frombuffer(content, f"<u{layout.width}").astype(np.uint32)
    if following != end:
        raise _changed(location)


def _changed(location: str) -> TokenisedFileError:
    return TokenisedFileError(f"{location} as it was listed", "another file", _AGAIN)


class Decoder:
    """Makes ids of tokenised files text again, so that they go through the filter that other text goes through.

    Parameters
    ----------
    tokenizer
        The store's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._below = max(tokenizer.get_vocab().values(), default=-1) + 1
        added = tokenizer.get_added_tokens_decoder()
        self._special = np.array([number for number, token in added.items() if token.special], np.uint32)

    def decode(self, ids: NDArray[np.uint32], name: str) -> tuple[NDArray[np.uint32], str]:
        """Ids without the special tokens at their two ends, as encoding makes none, and their text.

        Raises
        ------
        BuildError
            When there is an id that the tokenizer does not have; `name` is the document's.
        """
        if len(ids) and int(ids.max()) >= self._below:
            raise BuildError(f"token ids below {self._below:,} in {name}", f"{int(ids.max()):,}", _AGAIN)
        plain = np.flatnonzero(~np.isin(ids, self._special))
        ids = ids[plain[0] : plain[-1] + 1] if len(plain) else ids[:0]
        return ids, self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def plain(self, ids: NDArray[np.uint32]) -> str:
        """Text of ids without any special tokens."""
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        return text
