"""Serving drafter: many requests of one model, drafted for within one budget, whoever runs the model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Sequence as Many
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES, SpeculationConfig
from retrieve_spec.drafting.batch import NO_COST, Slots, plan_of
from retrieve_spec.drafting.drafter import Budget
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.budget import pruned, share_out
from retrieve_spec.errors import ConfigError
from retrieve_spec.integrations.pace import Pace
from retrieve_spec.integrations.requests import NOTHING, Request, Requests, each_of
from retrieve_spec.integrations.state import SAMPLED
from retrieve_spec.kernels.batch import CONTEXT, DEEPEST, STEPS
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
        self._plan = plan_of(MAX_NODES, vocabulary)
        self._texts: object = None
        self._samples = False

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
            trial.measured(1e-3)
            trial.feed(shape, text[:2])
            trial.draft([shape], 4, shape=shape)
            if shape == "chain":
                trial.step([shape], np.tile(text, 2)[None], np.array([15], np.int32), [0], [20], 4)
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
            rows = self._each(requests)
            trees = self._draft(rows, nodes, depths, shape == "chain") if rows else []
            for state, tree in zip(rows, trees, strict=True):
                state.tree = tree
            drafted = sum(map(len, trees))
            for name, more in (("steps", 1), ("rows", len(rows)), ("drafted", drafted)):
                self._counts[name] += more
            self._seconds += perf_counter() - began
            return trees

    def step(
        self,
        requests: Many[str],
        texts: NDArray[np.int32],
        lengths: NDArray[np.int32],
        places: Many[int],
        longest: Many[int],
        max_nodes: int,
    ) -> list[list[int]]:
        """Draft a chain for each request whose text the engine keeps: `feed` and `draft` in one compiled call.

        A draft is taken to have been verified by the step that the next call tells of, if the request takes part.

        Parameters
        ----------
        requests
            Names, each once. Where the same sequence comes again it says the same, places and texts too, and less is
            to be done.
        texts
            (rows, positions) int32, contiguous: the tokens of each of the engine's rows.
        lengths
            (≥ rows,) int32, how many tokens each row has.
        places
            The row of each request.
        longest
            Tokens that the text of each may have at most.
        max_nodes
            Nodes at most, of each.

        Returns
        -------
        list of list of int
            One for each request; empty ones where nothing is worth drafting.

        Raises
        ------
        RequestError
            A request is not under way, or named twice.
        ConfigError
            The arrays are of another kind.
        RequestDiverged
            A text does not go on from what its request was given; nothing was done.
        """
        began = perf_counter()
        with self._lock:
            slots = self._slots
            if slots is None or self._slots_of is not requests or self._texts is not texts:
                slots = self._fill_slots(requests, texts, lengths, places, longest, max_nodes)
            if any(lengths[place] > self._width for place in places):  # a kernel would read what lies behind
                raise ConfigError(f"lengths up to {self._width}", f"{lengths[list(places)]}", "See `step`.")
            plan, pace, rows = self._plan, self._pace, len(requests)
            context, sampled = int(plan[CONTEXT]), self._samples
            if rows and pace.goes_without(rows, sampled):
                slots.skip(plan)
                pace.stepped(rows, 0, context, sampled)
                drafts: list[list[int]] = [[] for _ in requests]
            else:
                seconds = pace.curve(rows, context, sampled) if rows else None
                drafts = slots.step(plan, lengths, NO_COST if seconds is None else seconds)
                if rows:
                    pace.stepped(rows, sum(map(len, drafts)), context, sampled, seconds is not None)
            self._seconds += perf_counter() - began
            return drafts

    def _fill_slots(
        self,
        requests: Many[str],
        texts: NDArray[np.int32],
        lengths: NDArray[np.int32],
        places: Many[int],
        longest: Many[int],
        max_nodes: int,
    ) -> Slots:
        """Rows for a step over requests that are not those of the last one.

        What compiled code will read is looked at here: it looks at nothing itself.
        """
        if texts.dtype != np.int32 or texts.strides[1:] != (4,) or lengths.dtype != np.int32:
            got = f"{texts.dtype} of shape {texts.shape} and {lengths.dtype}"
            raise ConfigError("texts (rows, positions) and lengths in int32, rows without gaps", got, "Copy them so.")
        if places and not 0 <= min(places) <= max(places) < min(len(texts), len(lengths)):
            raise ConfigError(f"places below {min(len(texts), len(lengths))}", f"{list(places)}", "See `step`.")
        if not len(requests) == len(places) == len(longest):
            got = f"{len(places)} and {len(longest)}"
            raise ConfigError(f"places and lengths for {len(requests)} requests", got, "See `step`.")
        rows = self._each(requests)
        begin, stride = texts.__array_interface__["data"][0], texts.strides[0]
        self._slots = Slots([state.row for state in rows], [begin + stride * i for i in places], places, longest)
        self._slots_of, self._texts, self._samples = requests, texts, _samples(rows)
        self._width = texts.shape[1]
        self._plan[DEEPEST] = min(max_nodes, self.config.max_depth, MAX_NODES)
        return self._slots

    def _draft(self, rows: Many[Request], nodes: Many[int], depths: Many[int], chains: bool) -> list[DraftTree]:
        context, sampled = max(state.row.length for state in rows), _samples(rows)
        if self._pace.goes_without(len(rows), sampled):
            self._pace.stepped(len(rows), 0, context, sampled)
            return [NOTHING] * len(rows)
        seconds = self._pace.curve(len(rows), context, sampled)
        cost = seconds if len(rows) == 1 else None
        found = []
        for state, most, depth in zip(rows, nodes, depths, strict=True):
            found.append(self._known(state.row.look(Budget(most, depth, cost), chains)))
        trees = share_out(found, seconds, MAX_NODES, np.ones(len(rows)))
        for state, tree in zip(rows, trees, strict=True):  # only a draft that does not pay is judged by its first token
            unknown = self.vocabulary is not None and state.row.first_token >= self.vocabulary
            if len(tree) or seconds is None or unknown:
                state.row.drop_first()
        self._pace.stepped(len(rows), sum(map(len, trees)), context, sampled, seconds is not None)
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
            for name in asked:
                if name in self:
                    self._requests[name].row.follow()

    def statistics(self) -> dict[str, float]:
        """Counts since the beginning.

        Returns
        -------
        dict
            `requests` begun, `steps` drafted for, `rows` of these steps, tokens `drafted`, `accepted` and `emitted`,
            `draft_seconds` spent in `draft`, requests `under_way`.
        """
        with self._lock:
            counts = dict(self._counts)
            for column, name in enumerate(("steps", "rows", "drafted", "accepted", "emitted"), STEPS):
                counts[name] += int(self._plan[column])
            return {**counts, "draft_seconds": self._seconds, "under_way": len(self._requests)}


def _samples(requests: Many[Request]) -> bool:
    """Whether tokens of any of these are sampled."""
    return any(state.kind == SAMPLED for state in requests)
