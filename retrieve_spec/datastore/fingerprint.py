"""Tokenizers of stores: the `tokenizers` backend, and a fingerprint of how it maps text to ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from retrieve_spec.errors import BuildError
from retrieve_spec.reference_model import REFERENCE, check_hub_id, copy_if_silent, reference_path

PREFIX = "sha256:"


def load_tokenizer(tokenizer: Any) -> Tokenizer:
    """Get the `tokenizers` backend.

    Parameters
    ----------
    tokenizer
        A `tokenizers.Tokenizer`, a fast Transformers tokenizer, a ``tokenizer.json``, a folder that holds one,
        ``"reference"`` for the bundled model's, or a Hugging Face hub id.

    Returns
    -------
    tokenizers.Tokenizer
        Without truncation or padding when read from a file; objects are handed through untouched.

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
    path = reference_path() if tokenizer == REFERENCE else Path(tokenizer).expanduser()
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


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash what decides which id a piece of text gets: vocabulary, merges and normaliser, not names.

    Added tokens stay out: chat variants of one model differ in them, and share their stores.

    Parameters
    ----------
    tokenizer
        As for `load_tokenizer`; a string that is already a fingerprint is returned as it is.

    Returns
    -------
    str
        ``"sha256:"`` and 64 hexadecimal digits.

    Raises
    ------
    BuildError
        When there is no such file, or it is no tokenizer.
    """
    if isinstance(tokenizer, str) and tokenizer.startswith(PREFIX):
        return tokenizer
    content = json.loads(load_tokenizer(tokenizer).to_str())
    model = content["model"]
    added = {token["content"] for token in content["added_tokens"]}
    vocabulary = model["vocab"]
    pieces = vocabulary.items() if isinstance(vocabulary, dict) else ((v[0], i) for i, v in enumerate(vocabulary))
    parts = {
        "model": model["type"],
        "vocabulary": sorted((i, piece) for piece, i in pieces if piece not in added),
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or ()],
        "normalizer": content["normalizer"],
    }
    return PREFIX + hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
