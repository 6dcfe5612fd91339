"""Replay of several answers to the same prompts: what drafting from one another gains, and from earlier answers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

from retrieve_spec.bench.replay import Replay
from retrieve_spec.bench.traces import Ids, TraceRow, read_trace
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.engine.siblings import Siblings
from retrieve_spec.errors import TraceError
from retrieve_spec.sources.answers import RolloutMemory

_ANY = 1 << 31
"""More tokens than any vocabulary has."""
_KEPT = ("tokens_per_pass", "nodes_per_pass", "passes", "tokens", "accepted_by_source")


def samples_of(rows: Iterable[TraceRow], count: int) -> list[list[TraceRow]]:
    """The first `count` rows of every group that has as many."""
    groups: dict[str, list[TraceRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return [group[:count] for group in groups.values() if len(group) >= count]


def replay_together(
    groups: Iterable[list[TraceRow]],
    nodes: int,
    share: bool,
    *,
    calibration: Calibration | None = None,
    rollouts: RolloutMemory | None = None,
) -> dict[str, Any]:
    """Replay the rows of every group in turns, a pass each, as samples that a model decodes at once.

    Parameters
    ----------
    groups
        Rows that are answers to the same question.
    nodes
        Draft nodes per pass at most.
    share
        Whether each drafts from what the others of its group have written, as `siblings="share"` does.
    calibration
        What is learned; None begins anew.
    rollouts
        Answers to the prompts of earlier epochs, which each draws on too if it shares, and its own is added to.
    """
    calibration = Calibration() if calibration is None else calibration
    config = SpeculationConfig(phrases="off")
    whole: Replay | None = None
    for group in groups:
        earlier = [] if rollouts is None else rollouts.automata(group[0].prompt, _ANY)
        siblings = Siblings(earlier=earlier) if share else None
        running: list[Generator[Ids, None, None]] = []
        for row in group:
            drafter = MixtureDrafter(config, session=siblings, calibration=calibration)
            whole = whole or Replay(drafter, nodes)
            running.append(whole.beside(drafter).passes(row))
        while running:
            running = [passes for passes in running if next(passes, None) is not None]
        if rollouts is not None:
            for row in group:
                rollouts.remember(row.prompt, row.segments[0][0])
    return {} if whole is None else {name: whole.result()[name] for name in _KEPT}


def replay_siblings(
    path: str | Path,
    tokenizer: Any,
    counts: Sequence[int],
    *,
    nodes: int = 60,
    limit: int | None = None,
    progress: Callable[[], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Replay recorded samples by number of siblings, with sharing and without.

    Parameters
    ----------
    path
        The trace; rows of one `group` are answers to the same question.
    tokenizer
        As for `retrieve_spec.bench.replay.replay_trace`.
    counts
        Siblings at a time: so many rows of each group are replayed together.
    nodes, limit
        Draft nodes per pass at most; rows read at most.
    progress
        Called after each of the 2 · `counts` replays.

    Returns
    -------
    dict
        By count: `groups`, `off` and `share` (tokens per pass, passes, tokens, accepted by source) and `gain`, by how
        much more tokens per pass there are with sharing.

    Raises
    ------
    TraceError
        No group has so many rows.
    """
    from retrieve_spec.datastore.fingerprint import load_tokenizer

    rows = list(read_trace(path, load_tokenizer(tokenizer), limit))
    found = {}
    for count in counts:
        groups = samples_of(rows, count)
        if not groups:
            raise TraceError(f"a group of {count} rows", f"none in {path}", "Give smaller numbers of siblings.")
        figures = {}
        for name in ("off", "share"):
            figures[name] = replay_together(groups, nodes, name == "share")
            if progress:
                progress()
        gain = figures["share"]["tokens_per_pass"] / figures["off"]["tokens_per_pass"] - 1.0
        found[str(count)] = {"groups": len(groups), **figures, "gain": gain}
    return found


def replay_epochs(
    path: str | Path,
    tokenizer: Any,
    epochs: int,
    *,
    samples: int = 1,
    nodes: int = 60,
    limit: int | None = None,
    progress: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Replay recorded samples as epochs over the same prompts, with a rollout memory and without.

    Parameters
    ----------
    path, tokenizer, nodes, limit, progress
        As for `replay_siblings`; rows are single answers.
    epochs
        Times that every prompt is answered.
    samples
        Rows of a group in each epoch, replayed together as siblings.

    Returns
    -------
    dict
        `groups`, `samples`, and by epoch the figures of `siblings` (nothing kept) and `memory`.

    Raises
    ------
    TraceError
        No group has ``epochs * samples`` rows of a single answer.
    """
    from retrieve_spec.datastore.fingerprint import load_tokenizer

    rows = (row for row in read_trace(path, load_tokenizer(tokenizer), limit) if len(row.segments) == 1)
    groups = samples_of(rows, epochs * samples)
    if not groups:
        remedy = "Give fewer epochs or siblings."
        raise TraceError(f"a group of {epochs * samples} single answers to one prompt", f"none in {path}", remedy)
    found: dict[str, Any] = {"groups": len(groups), "samples": samples}
    for name, rollouts in (("siblings", None), ("memory", RolloutMemory(answers=epochs * samples))):
        calibration, found[name] = Calibration(), []
        for first in range(0, epochs * samples, samples):
            epoch = [group[first : first + samples] for group in groups]
            found[name].append(replay_together(epoch, nodes, True, calibration=calibration, rollouts=rollouts))
            if progress:
                progress()
    return found
