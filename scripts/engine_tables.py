"""Tables of drafting inside engines of others from docs/data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from published import block, markdown_table

TABLES: dict[str, Callable[[], str]] = {}
"""What can stand between the marks of a page."""


@block(TABLES, "vllm-replay")
def vllm_replay(made: dict[str, Any]) -> list[str]:
    """Tokens per step on recorded conversations, of vLLM's suffix decoding and ours."""
    rows = []
    for file, states in made["files"].items():
        for state, found in states.items():
            shown = [f"{found['suffix']:.2f}", f"{found['ours']:.2f}", f"{found['ours'] / found['suffix']:.2f}"]
            rows.append([file, state, f"{found['turns']:,}", f"{found['tokens']:,}", *shown])
    head = ["recorded runs", "what is known of others", "answers", "tokens", "suffix decoding", "ours", "ratio"]
    return [*markdown_table(head, rows), "", f"Both draft {made['tokens']} tokens at most."]
