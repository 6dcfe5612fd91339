"""File of answers by keys: a head with a checksum, then keys, counts, lengths and tokens as plain arrays."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from retrieve_spec.errors import StoreCorruptError, StoreError, StoreVersionError, in_a_line

_VERSION = 1
_HEAD = struct.Struct("<12sIIQQ")
"""Magic, version, checksum of the rest, keys, answers."""
_REMEDY = "Delete the file, or give another path; answers are remembered anew."
_TOKEN = 4


class Kind(NamedTuple):
    """What the keys of a file stand for: 12 bytes that it begins with, bytes of a key, and a name for messages."""

    magic: bytes
    key: int
    name: str


ROLLOUTS = Kind(b"rs-rollouts\n", 16, "rollouts")
SESSIONS = Kind(b"rs-sessions\n", 32, "sessions")


def packed(known: Mapping[bytes, Collection[bytes]], kind: Kind = ROLLOUTS) -> bytes:
    """Answers (little-endian int32 tokens as bytes) by their keys, in their order, as bytes."""
    answers = [ids for of_key in known.values() for ids in of_key]
    body = b"".join(
        [
            *known,
            np.array([len(of_key) for of_key in known.values()], "<u4").tobytes(),
            np.array([len(ids) // _TOKEN for ids in answers], "<u4").tobytes(),
            *answers,
        ]
    )
    return _HEAD.pack(kind.magic, _VERSION, zlib.crc32(body), len(known), len(answers)) + body


def unpacked(path: Path, kind: Kind = ROLLOUTS) -> dict[bytes, list[bytes]]:
    """What `packed` wrote to a file; nothing where there is none.

    Raises
    ------
    StoreError
        It cannot be read.
    StoreCorruptError
        The file is something else, or damaged.
    StoreVersionError
        It was written by another version of this library.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_HEAD.size)
            size = path.stat().st_size
            if data.startswith(kind.magic):  # else it may be anything, a model's weights, say
                data += file.read()
                size = len(data)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StoreError(f"to read {path}", in_a_line(error), "Give another path, or let it be read.") from error
    if len(data) < _HEAD.size or not data.startswith(kind.magic):
        raise StoreCorruptError(f"a file of {kind.name} in {path}", f"another file of {size} bytes", _REMEDY)
    _, version, checksum, keys, count = _HEAD.unpack_from(data)
    if version != _VERSION:
        raise StoreVersionError(f"{kind.name} of format {_VERSION} in {path}", f"format {version}", _REMEDY)
    body = memoryview(data)[_HEAD.size :]
    first = keys * (kind.key + 4) + 4 * count
    if zlib.crc32(body) != checksum or len(body) < first:
        raise StoreCorruptError(f"{kind.name} in {path} as they were written", "a truncated or altered file", _REMEDY)
    counts = np.frombuffer(body, "<u4", keys, keys * kind.key).astype(np.int64)
    lengths = np.frombuffer(body, "<u4", count, keys * (kind.key + 4)).astype(np.int64)
    if counts.sum() != count or first + _TOKEN * lengths.sum() != len(body):
        raise StoreCorruptError(f"{kind.name} in {path} that add up", "lengths that do not", _REMEDY)
    tokens = np.frombuffer(body, "<i4", offset=first)
    if len(tokens) and int(tokens.min()) < 0:
        raise StoreCorruptError(f"token ids in {path}", "a negative one", _REMEDY)
    ends = (first + _TOKEN * np.cumsum(lengths)).tolist()
    answers = [bytes(body[begin:end]) for begin, end in zip([first, *ends], ends, strict=False)]
    last = np.cumsum(counts).tolist()
    names = [bytes(body[at : at + kind.key]) for at in range(0, keys * kind.key, kind.key)]
    return {name: answers[end - n : end] for name, end, n in zip(names, last, counts.tolist(), strict=True)}
