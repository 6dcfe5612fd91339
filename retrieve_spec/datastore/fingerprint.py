"""Tokenizers of stores: the `tokenizers` backend, and a fingerprint of the pipeline that maps text to ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from retrieve_spec.errors import BuildError
from retrieve_spec.reference_model import check_hub_id, copy_if_silent, known_folder

PREFIX = "sha256:"
PIECE_CHARS = 1 << 20
"""Longer texts are cut at line ends and encoded in pieces, which bounds memory."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
"""Fields of added tokens that affect neighbouring text."""


def load_tokenizer(tokenizer: Any) -> Tokenizer:
    """Load a tokenizer as an object of the `tokenizers` library.

    Parameters
    ----------
    tokenizer
        A `tokenizers.Tokenizer`, a fast Transformers tokenizer, a ``tokenizer.json``, a folder that holds one,
        a name such as ``"reference"`` (as for `load_model`), or a Hugging Face hub id.

    Returns
    -------
    tokenizers.Tokenizer
        Without truncation or padding if read from a file; objects are returned unchanged.

    Raises
    ------
    BuildError
        When there is no such file, or it is no tokenizer.
    ModelNotFoundError
        When a name can only be that of a file or folder, and nothing is there.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        return backend
    if not isinstance(tokenizer, str | Path):
        raise BuildError(
            "a tokenizer of the `tokenizers` library, or a path to its tokenizer.json",
            type(tokenizer).__name__,
            "Save the tokenizer with save_pretrained() and give the folder.",
        )
    path = known_folder(str(tokenizer)) or Path(tokenizer).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    on_hub = isinstance(tokenizer, str) and not path.exists()
    if on_hub:
        check_hub_id(str(tokenizer), "a tokenizer.json")
        path = copy_if_silent(str(tokenizer), "tokenizer.json") or path
    try:
        if path.exists() or not on_hub:
            loaded = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        else:
            loaded = Tokenizer.from_pretrained(str(tokenizer))
    except Exception as error:  # the library raises bare Exception
        raise BuildError(
            "a tokenizer.json, a model folder that holds one, or a hub id",
            f"{tokenizer} ({error})",
            "Check the path or name.",
        ) from error
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def encode(tokenizer: Tokenizer, text: str) -> NDArray[np.uint32]:
    """Encode a text without special tokens to (n,) uint32."""
    parts = []
    start = 0
    while start < len(text):
        end = start + PIECE_CHARS
        if end < len(text):
            end = text.find("\n", end, end + PIECE_CHARS) + 1 or end
        # A batch of one releases the interpreter lock and stays in its thread.
        encoded = tokenizer.encode_batch_fast([text[start:end]], add_special_tokens=False)[0]
        parts.append(np.array(encoded.ids, np.uint32))
        start = end
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash the parts of a tokenizer that decide a text's ids: normaliser, pre-tokenizer and model.

    Pipelines that are written differently but do the same have equal hashes. Added tokens that are not in the model's
    vocabulary are left out: chat variants of one model differ in them and share stores.

    Parameters
    ----------
    tokenizer
        As for `load_tokenizer`; a fingerprint is returned unchanged.

    Returns
    -------
    str
        ``"sha256:"`` and 64 hexadecimal digits.

    Raises
    ------
    BuildError
        When there is no such file, or it is no tokenizer.
    """
    if is_fingerprint(tokenizer):
        return str(tokenizer)
    return fingerprint_of(load_tokenizer(tokenizer))


def fingerprint_of(loaded: Tokenizer) -> str:
    """Return the fingerprint of a loaded tokenizer; see `tokenizer_fingerprint`."""
    content = json.dumps(_pipeline(loaded), sort_keys=True, separators=(",", ":"))
    return PREFIX + hashlib.sha256(content.encode()).hexdigest()


def is_fingerprint(tokenizer: Any) -> bool:
    """Whether a value is a fingerprint rather than a tokenizer or its path."""
    return isinstance(tokenizer, str) and tokenizer.startswith(PREFIX)


def pipeline_differences(one: Tokenizer, other: Tokenizer) -> list[str]:
    """Return the parts in which two tokenizers' pipelines differ, named as in ``tokenizer.json``."""
    first, second = _pipeline(one), _pipeline(other)
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def _pipeline(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the parts of a tokenizer that decide ids, in a normal form."""
    content = json.loads(tokenizer.to_str())
    model = content["model"]
    vocabulary = model.pop("vocab")
    pieces: dict[str, tuple[Any, ...]]
    if isinstance(vocabulary, list):  # Unigram: pieces and their scores, in the order of their ids
        pieces = {piece: (number, score) for number, (piece, score) in enumerate(vocabulary)}
    else:
        pieces = {piece: (number,) for piece, number in vocabulary.items()}
    added = {token["content"]: token for token in content["added_tokens"] if token["content"] in pieces}
    merges = model.pop("merges", [])
    parts = {
        "vocab": sorted((*place, piece) for piece, place in pieces.items() if piece not in added),
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "added_tokens": sorted(
            [name, *pieces[name], *(token[flag] for flag in _FLAGS)] for name, token in added.items()
        ),
        "normalizer": _steps(content["normalizer"], "normalizers"),
        "pre_tokenizer": _steps(content["pre_tokenizer"], "pretokenizers"),
        **_written(model),
    }
    return {name: part for name, part in parts.items() if part}


def _steps(component: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """Return the steps of a normaliser or pre-tokenizer; a sequence of one step equals that step."""
    if component is None:
        return []
    if component["type"] == "Sequence":
        return [step for one in component[inner] for step in _steps(one, inner)]
    return [_written({name: value for name, value in component.items() if name != "trim_offsets"})]


def _written(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without empty ones, which other versions of the library omit."""
    return {name: value for name, value in settings.items() if value not in (None, "", 0.0) or name == "unk_id"}
