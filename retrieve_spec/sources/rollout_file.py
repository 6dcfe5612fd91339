"""File of a rollout memory: a head with a checksum, then keys, counts, lengths and tokens as plain arrays."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.errors import StoreCorruptError, StoreVersionError

_MAGIC = b"rs-rollouts\n"
_VERSION = 1
_HEAD = struct.Struct("<12sIIQQ")
"""Magic, version, checksum of the rest, prompts, answers."""
_KEY = 16
_REMEDY = "Delete the file, or give another path; answers are remembered anew."


def packed(known: Mapping[bytes, tuple[NDArray[np.int32], ...]]) -> bytes:
    """Answers by the keys of their prompts, in their order, as bytes."""
    answers = [ids for of_prompt in known.values() for ids in of_prompt]
    body = b"".join(
        [
            *known,
            np.array([len(of_prompt) for of_prompt in known.values()], "<u4").tobytes(),
            np.array([len(ids) for ids in answers], "<u4").tobytes(),
            *(ids.astype("<i4").tobytes() for ids in answers),
        ]
    )
    return _HEAD.pack(_MAGIC, _VERSION, zlib.crc32(body), len(known), len(answers)) + body


def unpacked(path: Path) -> dict[bytes, tuple[NDArray[np.int32], ...]]:
    """What `packed` wrote to a file; nothing where there is none.

    Raises
    ------
    StoreCorruptError
        The file is something else, or damaged.
    StoreVersionError
        It was written by another version of this library.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        raise StoreCorruptError(f"a memory of rollouts in {path}", f"another file of {len(data)} bytes", _REMEDY)
    _, version, checksum, prompts, count = _HEAD.unpack_from(data)
    if version != _VERSION:
        raise StoreVersionError(f"rollouts of format {_VERSION} in {path}", f"format {version}", _REMEDY)
    body = memoryview(data)[_HEAD.size :]
    if zlib.crc32(body) != checksum or len(body) < prompts * (_KEY + 4) + 4 * count:
        raise StoreCorruptError(f"rollouts in {path} as they were written", "a truncated or altered file", _REMEDY)
    counts = np.frombuffer(body, "<u4", prompts, prompts * _KEY).astype(np.int64)
    lengths = np.frombuffer(body, "<u4", count, prompts * (_KEY + 4)).astype(np.int64)
    first = prompts * (_KEY + 4) + 4 * count
    if counts.sum() != count or first + 4 * lengths.sum() != len(body):
        raise StoreCorruptError(f"rollouts in {path} that add up", "lengths that do not", _REMEDY)
    tokens = np.frombuffer(body, "<i4", offset=first).astype(np.int32)
    if len(tokens) and int(tokens.min()) < 0:
        raise StoreCorruptError(f"token ids in {path}", "a negative one", _REMEDY)
    answers = [ids.copy() for ids in np.split(tokens, np.cumsum(lengths)[:-1])] if count else []
    ends = np.cumsum(counts).tolist()
    keys = [bytes(body[at : at + _KEY]) for at in range(0, prompts * _KEY, _KEY)]
    return {key: tuple(answers[end - n : end]) for key, end, n in zip(keys, ends, counts.tolist(), strict=True)}
