"""Replay recorded answers: verify a drafter's trees without the model, and count accepted tokens."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.bench.methods import FreshDrafter
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.datastore.fingerprint import load_tokenizer
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.errors import ConfigError, TraceError
from retrieve_spec.kernels.phrases import BOUNDARY
from retrieve_spec.sources import SOURCE_NAMES

LIVE = "live"
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A recorded conversation: the prompt, then segments in order; only generated ones are drafted.

    Rows of one group share text (a repository, a repeated question), and are never split.
    """

    task: str
    prompt: Ids
    segments: list[tuple[Ids, bool]]
    group: str = ""


def read_trace(path: str | Path, tokenizer: Any, limit: int | None = None) -> Iterator[TraceRow]:
    """Read and encode the rows of a trace file: prompts with special tokens, later segments without.

    Parameters
    ----------
    path
        JSON Lines with ``prompt``, ``output`` and optionally ``more`` ([[context, generation], …]), ``task``,
        ``meta.loop`` (true: the row is left out), ``group`` (each row without one is a group).
    tokenizer
        A `tokenizers.Tokenizer`, or an object with the same `encode`.
    limit
        Most rows to read, in file order, including rows that are left out.

    Raises
    ------
    TraceError
        A line is not JSON, or lacks a field.
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


def _ids(tokenizer: Any, text: str, special: bool) -> Ids:
    return np.array(tokenizer.encode(text, add_special_tokens=special).ids, np.int32)


class Replay:
    """Replays rows through one drafter, and collects figures.

    Parameters
    ----------
    drafter
        A `Drafter` with `feed`, which appends text that was neither drafted nor generated.
    nodes
        Most draft nodes per pass.
    node_cost
        Cost of a node as a share of a pass without drafts, by which drafts are sized; None: use all nodes.
    """

    def __init__(self, drafter: Any, nodes: int = 60, node_cost: float | None = None) -> None:
        self.drafter, self.nodes, self.node_cost = drafter, nodes, node_cost
        self._cost = None if node_cost is None else (1.0 + node_cost * np.arange(nodes + 1)).astype(np.float32)
        self._by_task: dict[str, Counter[str]] = defaultdict(Counter)  # passes, tokens and nodes
        self._accepted = Counter[str]()
        self._expected = 0.0
        self._times: list[tuple[float, float]] = []  # microseconds of drafting and of learning

    def run(self, rows: Iterable[TraceRow], progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        """Replay all rows; call ``progress(tokens, passes)`` with the totals after each. See `result`."""
        for row in rows:
            self.drafter.start(row.prompt)
            for ids, generated in row.segments:
                if generated:
                    self._generate(ids, self._by_task[row.task])
                else:
                    self.drafter.feed(ids)
            self.drafter.finish()
            if progress:
                total = sum(self._by_task.values(), Counter[str]())
                progress(total["tokens"], total["passes"])
        return self.result()

    def _generate(self, output: Ids, tally: Counter[str]) -> None:
        at = 0
        while at < len(output):
            began = time.perf_counter()
            tree = self.drafter.propose(Budget(self.nodes, len(output) - at, self._cost))
            proposed = time.perf_counter()
            path = tree.path_along(output[at:])
            emitted = output[at : at + len(path) + 1]
            verified = VerifiedPass(tree, path, emitted)
            middle = time.perf_counter()
            self.drafter.observe(verified)
            self._times.append(((proposed - began) * 1e6, (time.perf_counter() - middle) * 1e6))
            tally.update(passes=1, tokens=len(emitted), nodes=len(tree))
            self._expected += 1.0 + tree.expected_accepted
            self._accepted.update(SOURCE_NAMES[tree.source[node]] for node in path)
            at += len(emitted)

    def result(self) -> dict[str, Any]:
        """Return the figures so far as a JSON-ready object."""
        total = sum(self._by_task.values(), Counter[str]())
        passes = max(total["passes"], 1)
        took = passes + (self.node_cost or 0.0) * total["nodes"]
        times = np.array(self._times or [(0.0, 0.0)]).T
        return {
            **({} if self.node_cost is None else {"speedup": total["tokens"] / took}),
            "tokens_per_pass": total["tokens"] / passes,
            "nodes_per_pass": total["nodes"] / passes,
            "passes": total["passes"],
            "tokens": total["tokens"],
            "propose_us": _quantiles(times[0]),
            "observe_us": _quantiles(times[1]),
            "pass_us": _quantiles(times[0] + times[1]),
            "expected_tokens_per_pass": self._expected / passes,
            "by_task": {
                task: {
                    "tokens_per_pass": t["tokens"] / max(t["passes"], 1),
                    "passes": t["passes"],
                    "tokens": t["tokens"],
                }
                for task, t in sorted(self._by_task.items())
            },
            "accepted_by_source": dict(sorted(self._accepted.items())),
        }


def halves(rows: Iterable[TraceRow]) -> tuple[list[TraceRow], list[TraceRow]]:
    """Split rows into every other group and the rest."""
    sides: tuple[list[TraceRow], list[TraceRow]] = [], []
    place: dict[str, int] = {}
    for row in rows:
        sides[place.setdefault(row.group, len(place)) % 2].append(row)
    return sides


def _quantiles(values: NDArray[np.float64]) -> dict[str, float]:
    return {"p50": float(np.median(values)), "p99": float(np.percentile(values, 99))}


def _taught(drafter: Any, rows: Iterable[TraceRow]) -> Any:
    """Return a drafter that has learned phrases from recorded answers, one request each, and learns no more."""
    sources = getattr(drafter, "sources", None)
    if sources is None or sources.phrases is None:
        raise ConfigError("a drafter that drafts from phrases", "another one", "Replay `auto` with its phrases.")
    for row in rows:
        parts = [part for ids, generated in row.segments if generated for part in (ids, np.array([BOUNDARY], np.int32))]
        sources.phrases.learn(np.concatenate(parts))
    drafter.learns_phrases = False
    return drafter


def replay_trace(
    path: str | Path,
    tokenizer: Any,
    config: SpeculationConfig = SpeculationConfig(session=False),
    *,
    nodes: int = 60,
    node_cost: float | None = None,
    stores: Sequence[str | Path] = (),
    without: Sequence[str] = (),
    phrases: str = LIVE,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Replay the recorded answers of a file, and count the passes that drafting saves.

    Parameters
    ----------
    path
        The trace, JSON Lines as described at `read_trace`.
    tokenizer
        The model's tokenizer: a ``tokenizer.json``, a model folder, a hub id or an object.
    config
        Drafting settings; with a session, answers of earlier rows are remembered.
    nodes
        Most nodes per pass.
    node_cost
        Cost of a node as a share of a pass without drafts; `auto` then sizes its drafts by it.
    stores
        Folders of datastores to draft from.
    without
        Sources that `auto` leaves out.
    phrases
        `"live"`: learn phrases from row to row, as in use. `"warm"`: replay each half of the rows (`halves`) with
        phrases of the other half, without learning more, which isolates the effect of phrases.
    limit
        Most rows to read.
    progress
        Called with the tokens and passes so far after each row.

    Returns
    -------
    dict
        `tokens_per_pass`, `nodes_per_pass`, `passes`, `tokens`, `propose_us` and `observe_us` (p50, p99),
        `expected_tokens_per_pass`, `by_task`, `accepted_by_source`; with `node_cost` also `speedup`: tokens in the time
        of a pass without drafts, excluding the time of drafting.

    Raises
    ------
    TraceError, TokenizerMismatchError, UnknownPresetError, MissingSourceError
        The file, a store or the preset cannot be used.
    """
    encoder = load_tokenizer(tokenizer)
    opened = [open_datastore(store, tokenizer=encoder) for store in stores]
    fresh = FreshDrafter(config, opened, without, encoder)
    if not hasattr(fresh.drafter, "feed"):
        remedy = "Replay `auto` or another preset."
        raise ConfigError("a preset that can be fed text it did not draft", repr(config.draft), remedy)
    rows = read_trace(path, encoder, limit)
    replay = Replay(fresh.drafter, nodes, node_cost)
    if phrases == LIVE:
        replay.run(rows, progress)
    else:
        one, other = halves(rows)
        for replayed, learned in ((one, other), (other, one)):
            fresh.renew()
            replay.drafter = _taught(fresh.drafter, learned)
            replay.run(replayed, progress)
    result = replay.result()
    if not result["passes"]:
        raise TraceError("at least one recorded answer", f"none in {path}", "Give a trace that holds some.")
    return result
