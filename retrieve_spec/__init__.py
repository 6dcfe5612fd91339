"""Lossless, model-free speculative decoding for Hugging Face causal language models."""

from __future__ import annotations

import importlib
from typing import Any

from retrieve_spec._version import __version__

_EXPORTS = {
    "GenerationReport": "retrieve_spec.engine.report",
    "SpeculationConfig": "retrieve_spec.config",
    "accelerate": "retrieve_spec.acceleration",
    "accelerated": "retrieve_spec.acceleration",
    "build_datastore": "retrieve_spec.datastore.build",
    "generate_many": "retrieve_spec.acceleration",
    "generate_stream": "retrieve_spec.acceleration",
    "open_datastore": "retrieve_spec.datastore.store",
    "restore": "retrieve_spec.acceleration",
    "DraftTree": "retrieve_spec.drafting.tree",
    "GrammarProcessor": "retrieve_spec.sampling.guides",
    "RolloutMemory": "retrieve_spec.sources.answers",
}

__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that the command line starts without torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
