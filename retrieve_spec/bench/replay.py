"""Replay of recorded answers: greedy verification of a drafter without the model, and its acceptance figures."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from retrieve_spec.bench.traces import Ids, TraceRow, read_trace
from retrieve_spec.drafting.drafter import Budget, Drafter, VerifiedPass
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.tree import ROOT, DraftTree
from retrieve_spec.errors import ConfigError, TraceError
from retrieve_spec.kernels.phrases import BOUNDARY
from retrieve_spec.sources import SOURCE_NAMES
from retrieve_spec.sources.phrases import PhraseMemory

LIVE, WARM = "live", "warm"


@runtime_checkable
class FeedingDrafter(Drafter, Protocol):
    """A drafter that can be given text which was neither drafted nor generated."""

    def feed(self, token_ids: Ids) -> None:
        """Append text to the text so far."""


@dataclass(slots=True)
class Tally:
    """Counts of one group of rows."""

    passes: int = 0
    tokens: int = 0
    nodes: int = 0
    expected: float = 0.0
    accepted: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.passes + other.passes,
            self.tokens + other.tokens,
            self.nodes + other.nodes,
            self.expected + other.expected,
            self.accepted + other.accepted,
        )


class Replay:
    """Replays rows through one drafter and keeps the figures.

    Parameters
    ----------
    drafter
        Anything that fulfils the `Drafter` door and can `feed`.
    nodes
        Draft nodes per pass at most.
    node_cost
        What a node adds to a pass, as a share of a pass without drafts; drafts are sized by it. None fills the nodes.
    """

    def __init__(self, drafter: FeedingDrafter, nodes: int = 60, node_cost: float | None = None) -> None:
        self.drafter = drafter
        self.nodes = nodes
        self.node_cost = node_cost
        self._cost = None if node_cost is None else (1.0 + node_cost * np.arange(nodes + 1)).astype(np.float32)
        self.by_task: dict[str, Tally] = defaultdict(Tally)
        self.propose_us: list[float] = []
        self.observe_us: list[float] = []

    def run(self, rows: Iterable[TraceRow], progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        """Replay all rows, calling ``progress(tokens, passes)`` with the totals after each; see `result`."""
        for row in rows:
            self.drafter.start(row.prompt)
            for ids, generated in row.segments:
                if generated:
                    self._generate(ids, self.by_task[row.task])
                else:
                    self.drafter.feed(ids)
            self.drafter.finish()
            if progress:
                totals = self.by_task.values()
                progress(sum(t.tokens for t in totals), sum(t.passes for t in totals))
        return self.result()

    def _generate(self, output: Ids, tally: Tally) -> None:
        at = 0
        while at < len(output):
            began = time.perf_counter()
            tree = self.drafter.propose(Budget(self.nodes, len(output) - at, self._cost))
            proposed = time.perf_counter()
            path = walk(tree, output[at:])
            emitted = output[at : at + len(path) + 1]
            verified = VerifiedPass(tree, path, emitted)
            middle = time.perf_counter()
            self.drafter.observe(verified)
            self.observe_us.append((time.perf_counter() - middle) * 1e6)
            self.propose_us.append((proposed - began) * 1e6)
            tally.passes += 1
            tally.tokens += len(emitted)
            tally.nodes += len(tree)
            tally.expected += 1.0 + tree.expected_accepted
            tally.accepted.update(SOURCE_NAMES[tree.source[node]] for node in path)
            at += len(emitted)

    def result(self) -> dict[str, Any]:
        """Figures so far, as one JSON-ready object."""
        total = sum(self.by_task.values(), Tally())
        passes = max(total.passes, 1)
        took = passes + (self.node_cost or 0.0) * total.nodes
        return {
            **({} if self.node_cost is None else {"speedup": total.tokens / took}),
            "tokens_per_pass": total.tokens / passes,
            "nodes_per_pass": total.nodes / passes,
            "passes": total.passes,
            "tokens": total.tokens,
            "propose_us": _quantiles(self.propose_us),
            "observe_us": _quantiles(self.observe_us),
            "pass_us": _quantiles([a + b for a, b in zip(self.propose_us, self.observe_us, strict=True)]),
            "expected_tokens_per_pass": total.expected / passes,
            "by_task": {
                task: {"tokens_per_pass": t.tokens / max(t.passes, 1), "passes": t.passes, "tokens": t.tokens}
                for task, t in sorted(self.by_task.items())
            },
            "accepted_by_source": dict(sorted(total.accepted.items())),
        }


def walk(tree: DraftTree, output: Ids) -> Ids:
    """Nodes of the path that the recorded output takes; the bonus token is left for the end of the output."""
    path: list[int] = []
    at = ROOT
    parents, tokens = tree.parent.tolist(), tree.token_ids.tolist()
    children = {edge: node for node, edge in enumerate(zip(parents, tokens, strict=True))}
    for token in output.tolist():
        node = children.get((at, token))
        if node is None:
            break
        path.append(node)
        at = node
    return np.array(path, np.int32)


def halves(rows: Iterable[TraceRow]) -> tuple[list[TraceRow], list[TraceRow]]:
    """Every other group of the rows, and the groups between."""
    sides: tuple[list[TraceRow], list[TraceRow]] = [], []
    place: dict[str, int] = {}
    for row in rows:
        sides[place.setdefault(row.group, len(place)) % 2].append(row)
    return sides


def teach_phrases(phrases: PhraseMemory, rows: Iterable[TraceRow]) -> None:
    """Let a phrase memory learn recorded answers, one request each, as if they had been generated."""
    between = np.array([BOUNDARY], np.int32)
    for row in rows:
        parts = [part for ids, generated in row.segments if generated for part in (ids, between)]
        phrases.learn(np.concatenate(parts))


def _quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {"p50": 0.0, "p99": 0.0}
    return {"p50": float(np.median(values)), "p99": float(np.percentile(values, 99))}


def _taught(drafter: Any, rows: Iterable[TraceRow]) -> FeedingDrafter:
    """A drafter that knows the phrases of rows, and learns no more of them."""
    if not isinstance(drafter, MixtureDrafter) or drafter.phrases is None:
        raise ConfigError("a drafter that drafts from phrases", "another one", "Replay `auto` with its phrases.")
    teach_phrases(drafter.phrases, rows)
    drafter.learns_phrases = False
    return drafter


def replay_trace(
    path: str | Path,
    tokenizer: Any,
    *,
    draft: str = "auto",
    nodes: int = 60,
    node_cost: float | None = None,
    stores: Sequence[str | Path] = (),
    session: bool = False,
    without: Sequence[str] = (),
    phrases: str = LIVE,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Replay the recorded answers of a file and count what drafting would have saved.

    Parameters
    ----------
    path
        The trace (`read_trace` says what a row holds).
    tokenizer
        The tokenizer of the model that will answer: a ``tokenizer.json``, a model folder, a hub id or an object.
    draft, nodes
        Preset and nodes per pass at most.
    node_cost
        What a node adds to a pass, as a share of a pass without drafts: `auto` then sizes its drafts by it.
    stores
        Folders of datastores to draft from.
    session
        Remember the answers of earlier rows.
    without
        Sources that `auto` does without.
    phrases
        `"live"`: learned from one row to the next, as a model does. `"warm"`: each half of the rows (`halves`) is
        replayed with the phrases of the other half and learns none, so that figures are those of phrases alone.
    limit
        Rows read at most.
    progress
        Called with the tokens and passes so far after each row.

    Returns
    -------
    dict
        `tokens_per_pass`, `nodes_per_pass`, `passes`, `tokens`, `propose_us` and `observe_us` (p50, p99),
        `expected_tokens_per_pass`, `by_task`, `accepted_by_source`; with `node_cost` also `speedup`: tokens in the time
        of a pass without drafts, drafting itself not counted.

    Raises
    ------
    TraceError, TokenizerMismatchError, UnknownPresetError, MissingSourceError
        When the file, a store or the preset does not fit.
    """
    from retrieve_spec.bench.ablation import FreshDrafter
    from retrieve_spec.config import SpeculationConfig
    from retrieve_spec.datastore.fingerprint import load_tokenizer
    from retrieve_spec.datastore.store import open_datastore

    encoder = load_tokenizer(tokenizer)
    opened = [open_datastore(store, tokenizer=encoder) for store in stores]
    fresh = FreshDrafter(SpeculationConfig(draft=draft, session=session), opened, without, encoder)
    if not isinstance(fresh.drafter, FeedingDrafter):
        raise ConfigError(
            "a preset that can be fed text it did not draft", repr(draft), "Replay `auto` or another preset."
        )
    replay = Replay(fresh.drafter, nodes, node_cost)
    rows = read_trace(path, encoder, limit)
    if phrases == WARM:
        one, other = halves(rows)
        for replayed, learned in ((one, other), (other, one)):
            fresh.renew()
            replay.drafter = _taught(fresh.drafter, learned)
            result = replay.run(replayed, progress)
    else:
        result = replay.run(rows, progress)
    if not result["passes"]:
        raise TraceError("at least one recorded answer", f"none in {path}", "Give a trace that holds some.")
    return result
