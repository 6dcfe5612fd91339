"""Recorded answers in, acceptance figures out: replays greedy verification of a drafter without the model."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.drafter import Budget, Drafter, VerifiedPass
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.tree import ROOT, DraftTree
from retrieve_spec.errors import ConfigError, TraceError
from retrieve_spec.kernels.phrases import BOUNDARY
from retrieve_spec.sources import SOURCE_NAMES
from retrieve_spec.sources.phrases import PhraseMemory

Ids = NDArray[np.int32]
LIVE, WARM = "live", "warm"


class Encoder(Protocol):
    """What replay needs of a tokenizer (`tokenizers.Tokenizer`)."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> Any:
        """Object with ``.ids``."""


@runtime_checkable
class FeedingDrafter(Drafter, Protocol):
    """A drafter that can be given text which was neither drafted nor generated."""

    def feed(self, token_ids: Ids) -> None:
        """Append text to the text so far."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded conversation: the prompt, then segments in order; only generated ones are drafted.

    Rows of one group share text (a repository, a question asked again) and are kept on one side of a split.
    """

    task: str
    prompt: Ids
    segments: list[tuple[Ids, bool]]
    group: str = ""


@dataclass(slots=True)
class Tally:
    """Counts of one group of rows."""

    passes: int = 0
    tokens: int = 0
    nodes: int = 0
    expected: float = 0.0
    accepted: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, other: Tally) -> None:
        """Sum two tallies."""
        self.passes += other.passes
        self.tokens += other.tokens
        self.nodes += other.nodes
        self.expected += other.expected
        for name, count in other.accepted.items():
            self.accepted[name] += count


def read_trace(path: str | Path, tokenizer: Encoder, limit: int | None = None) -> Iterator[TraceRow]:
    """Rows of a trace file, encoded: the prompt with special tokens, every later segment without.

    Parameters
    ----------
    path
        JSON Lines with ``prompt``, ``output`` and optionally ``more`` ([[context, generation], …]), ``task``,
        ``meta.loop`` (true: the row is left out), ``group`` (rows without one are groups of their own).
    tokenizer
        Encodes text.
    limit
        Rows read at most, in file order, left-out rows counted.

    Raises
    ------
    TraceError
        When a line is not JSON or lacks a field.
    """
    with open(path, encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and number > limit:
                return
            row = _parse(line, number, path)
            if (row.get("meta") or {}).get("loop"):
                continue
            segments = [(_ids(tokenizer, row["output"], False), True)]
            for context, generated in row.get("more") or []:
                segments += [(_ids(tokenizer, context, False), False), (_ids(tokenizer, generated, False), True)]
            group = row.get("group")
            prompt = _ids(tokenizer, row["prompt"], True)
            yield TraceRow(row.get("task") or "", prompt, segments, f"line {number}" if group is None else str(group))


def _parse(line: str, number: int, path: str | Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
        turns = [text for context, generated in row.get("more") or [] for text in (context, generated)]
        texts = [row["prompt"], row["output"], row.get("task") or "", *turns]
        "".join(texts).encode()  # fails for what is no string, or none that can be encoded
        if not isinstance(row.get("meta") or {}, dict):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise TraceError(
            "one JSON object per line with the strings 'prompt' and 'output' (and 'more' as pairs of strings)",
            f"line {number} of {path}: {line[:60].rstrip()!r}",
            "Write the log in that form (docs/benchmarks.md).",
        ) from None
    return row  # type: ignore[no-any-return]


def _ids(tokenizer: Encoder, text: str, special: bool) -> Ids:
    return np.array(tokenizer.encode(text, add_special_tokens=special).ids, np.int32)


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
            tally = self.by_task[row.task]
            self.drafter.start(row.prompt)
            for ids, generated in row.segments:
                if generated:
                    self._generate(ids, tally)
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
            for node in path:
                tally.accepted[SOURCE_NAMES[tree.source[node]]] += 1
            at += len(emitted)

    def result(self) -> dict[str, Any]:
        """Figures so far, as one JSON-ready object."""
        total = Tally()
        for tally in self.by_task.values():
            total.add(tally)
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
    children: dict[tuple[int, int], int] = {}
    if len(tree):
        children = {
            (int(p), int(t)): i
            for i, (p, t) in enumerate(zip(tree.parent.tolist(), tree.token_ids.tolist(), strict=True))
        }
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
    fresh = FreshDrafter(SpeculationConfig(draft=draft, session=session), opened, without)
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
