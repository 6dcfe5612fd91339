"""Serving drafter: many requests of one model, drafted for within one budget, whoever runs the model."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from collections.abc import Sequence as Many
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np

from retrieve_spec.config import MAX_NODES, SpeculationConfig
from retrieve_spec.drafting.many import NOTHING, follow_all, propose_all
from retrieve_spec.drafting.mixture import NO_HOPE
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.budget import pruned, share_out
from retrieve_spec.errors import ConfigError, RequestError
from retrieve_spec.integrations.pace import Pace
from retrieve_spec.integrations.requests import Request, Requests, each_of
from retrieve_spec.integrations.state import GREEDY, SAMPLED
from retrieve_spec.sources.session import SessionMemory

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

Shape = Literal["chain", "tree"]


class ServingDrafter(Requests):
    """Drafts for the requests of an engine that holds the model itself; any of its methods may be called by any thread.

    Each request has a text of its own, which is never drafted into another's unless there is a session. Stores,
    calibration, phrases and the session are shared. Whatever is drafted, what is emitted is the engine's: a draft can
    cost time, never change a text.

    Parameters
    ----------
    config
        Limits of the drafts (`max_depth`, `min_path_probability`) and sources (`session`, `phrases`); the rest is of
        no meaning here. Hidden states and logits are not asked for, so neither dense indexes nor recycling are used.
    datastores
        Open stores to draft from.
    session
        Memory of earlier texts to draft from and add to; None for one of its own if `config.session`, else none.
    vocabulary
        Tokens of the model: what has another number is never drafted. None: anything may be.
    state
        Folder in which calibration, phrases and the session are kept between runs, one for each model; made when there
        is none.

    Raises
    ------
    ConfigError
        The state folder cannot be made.

    Examples
    --------
    ::

        drafter = ServingDrafter(datastores=[store])
        drafter.prepare()
        drafter.start("a", prompt_ids)                      # while the engine reads the prompt
        drafter.feed("a", first_token)
        [tree] = drafter.draft(["a"], max_nodes=16)         # tree.token_ids: a chain
        ...                                                 # one step of the engine
        drafter.measured(seconds)                           # what the step took
        drafter.feed("a", accepted_tokens_and_the_next)
        drafter.finish("a")
    """

    def __init__(
        self,
        config: SpeculationConfig | None = None,
        *,
        datastores: Many[Datastore] = (),
        session: SessionMemory | None = None,
        vocabulary: int | None = None,
        state: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(config, datastores, session, state)
        self.vocabulary = vocabulary
        self._pace = Pace()
        self._seconds = 0.0

    def prepare(self, shapes: Many[Shape] = ("chain", "tree")) -> None:
        """Compile the kernels, or load them from Numba's cache, before the first token depends on it.

        Parameters
        ----------
        shapes
            What will be asked for.
        """
        trial = ServingDrafter(self.config, datastores=self.datastores)
        text = np.arange(12, dtype=np.int32) % 4
        for shape in shapes:
            trial.start(shape, text)
            trial.draft([shape], 4, shape=shape)
            trial.feed(shape, text[:2])
            trial.draft([shape], 4, shape=shape)
            trial.finish(shape)

    def draft(
        self,
        requests: Many[str],
        max_nodes: int | Many[int],
        *,
        max_depth: int | Many[int] | None = None,
        shape: Shape = "chain",
    ) -> list[DraftTree]:
        """Draft what follows the texts of all requests that take part in the engine's next step.

        The nodes go where they are most probably accepted, over all requests, as many as pay by what was `measured`;
        none where nothing does. While nothing was measured, every request gets all it may have.

        Parameters
        ----------
        requests
            Names, each once.
        max_nodes
            Nodes at most, of each.
        max_depth
            Longest path at most, of each: tokens that may still be generated, less one.
        shape
            `"chain"`, or `"tree"` for engines that verify branches.

        Returns
        -------
        list of DraftTree
            One for each request; empty ones where nothing is worth drafting.

        Raises
        ------
        RequestError
            A request is not under way, or named twice.
        ConfigError
            There is no such shape, or another number of limits than of requests.
        """
        began = perf_counter()
        if shape not in ("chain", "tree"):
            raise ConfigError("shape 'chain' or 'tree'", repr(shape), "Trees are for engines that verify branches.")
        nodes = each_of(max_nodes, len(requests), "max_nodes")
        depths = each_of(MAX_NODES if max_depth is None else max_depth, len(requests), "max_depth")
        with self._lock:
            rows = [self._of(request) for request in requests]
            if len(set(requests)) < len(rows):
                raise RequestError("each request once", f"{list(requests)}", "Ask for one draft of each.")
            trees = self._draft(rows, nodes, depths, shape == "chain") if rows else []
            for state, tree in zip(rows, trees, strict=True):
                state.tree = tree
            drafted = sum(map(len, trees))
            if rows:
                self._pace.stepped(len(rows), drafted, max(state.length for state in rows))
            for name, more in (("steps", 1), ("rows", len(rows)), ("drafted", drafted)):
                self._counts[name] += more
            self._seconds += perf_counter() - began
            return trees

    def rest(self, rows: int, context: int) -> bool:
        """Take the next step without drafts and without a look at the requests, if drafting did not pay lately.

        Their tokens may be fed later, all at once: where drafting does not pay it is to cost next to nothing. Only for
        requests whose last step had no drafts.

        Parameters
        ----------
        rows, context
            How many requests take part, and the length of the longest.

        Returns
        -------
        bool
            False where `draft` is to be asked.
        """
        with self._lock:
            if not self._pace.rests():
                return False
            self._pace.stepped(rows, 0, context)
            self._counts["steps"] += 1
            self._counts["rows"] += rows
            return True

    def _draft(self, rows: Many[Request], nodes: Many[int], depths: Many[int], chains: bool) -> list[DraftTree]:
        if self._pace.goes_without(len(rows)):
            return [NOTHING] * len(rows)
        seconds = self._pace.curve(len(rows), max(state.length for state in rows))
        trees = [NOTHING] * len(rows)
        for kind in (GREEDY, SAMPLED):
            asked = [i for i, state in enumerate(rows) if state.kind == kind]
            if not asked:
                continue
            found = propose_all(
                [rows[i].row for i in asked],
                [nodes[i] for i in asked],
                [depths[i] for i in asked],
                seconds if len(rows) == 1 else None,
                chains,
            )
            for i, tree in zip(asked, found, strict=True):
                trees[i] = self._known(tree)
        if len(rows) > 1:
            whole, trees = trees, share_out(trees, seconds, MAX_NODES, np.ones(len(rows)))
            hopes = [(int(tree.token_ids[0]), math.exp(tree.log_p[0])) if len(tree) else NO_HOPE for tree in whole]
        else:
            hopes = [rows[0].row.hoped if seconds is not None else NO_HOPE]
        for state, (token, p), kept in zip(rows, hopes, trees, strict=True):  # drafts not made say something, too
            said = p > 0 and not len(kept) and (self.vocabulary is None or token < self.vocabulary)
            state.hoped = (token, p) if said else None
        self._pace.looked(sum(map(len, trees)), seconds is not None)
        return trees

    def _known(self, tree: DraftTree) -> DraftTree:
        """The nodes of a tree that the model has tokens for, without those behind others."""
        if self.vocabulary is None or not len(tree) or max(tree.token_ids.tolist()) < self.vocabulary:
            return tree
        kept = tree.token_ids < self.vocabulary
        for i in range(len(tree)):
            kept[i] &= tree.parent[i] < 0 or kept[tree.parent[i]]
        return pruned(tree, kept)

    def measured(self, seconds: float) -> None:
        """Say what the engine's step over the last drafts took; leave it out of steps that read prompts too.

        From the first report on, nodes are drafted only where they pay.

        Raises
        ------
        ConfigError
            No step takes that long.
        """
        if not 0.0 < seconds < float("inf"):
            raise ConfigError("seconds above 0", repr(seconds), "Measure from one draft to the next.")
        with self._lock:
            self._pace.measured(seconds)

    def follow(self, requests: Iterable[str] | None = None) -> None:
        """Let drafters take in now what their requests were given; else the next `draft` does.

        For an engine that has time for that while its model runs. `requests` that are not under way are left out.
        """
        with self._lock:
            asked = self._requests if requests is None else dict.fromkeys(requests)
            names = [name for name in asked if name in self]
            for kind in (GREEDY, SAMPLED):
                follow_all([self._requests[name].row for name in names if self._requests[name].kind == kind])

    def statistics(self) -> dict[str, float]:
        """Counts since the beginning.

        Returns
        -------
        dict
            `requests` begun, `steps` drafted for, `rows` of these steps, tokens `drafted`, `accepted` and `emitted`,
            `draft_seconds` spent in `draft`, requests `under_way`.
        """
        with self._lock:
            return {**self._counts, "draft_seconds": self._seconds, "under_way": len(self._requests)}
