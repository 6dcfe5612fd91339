"""Serving drafter: drafts for many requests of one model within one budget, whichever engine runs the model."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES, SpeculationConfig
from retrieve_spec.drafting.batch import BatchRow, SeenPass, Slots
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree
from retrieve_spec.engine.budget import Backoff, CostModel, Costs, Seconds, within
from retrieve_spec.engine.draft_batch import BatchBudget, draft_batch
from retrieve_spec.errors import ConfigError, PromptError, RequestError, RetrieveSpecError, in_a_line, require
from retrieve_spec.kernels.batch import PLAN
from retrieve_spec.sources.answers import AnswerMemory, answers_by_scope
from retrieve_spec.sources.distilled import ModelTables
from retrieve_spec.sources.session import SessionMemory, token_ids_of

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

logger = logging.getLogger(__name__)
Shape = Literal["chain", "tree"]
GREEDY, SAMPLED = "greedy", "sampled"
_NO_COST = np.empty(0, np.float32)
_ANY_TOKEN = 1 << 31
_SAVE_EVERY = 30.0
"""Seconds between writes of what was learned, at the end of requests."""
_PATIENCE = 4
"""Drafts in a row that do not pay before steps go without: fewer say little about the next one. Waiting for so many
gains one per cent for a lone sampled request."""


@dataclass(slots=True)
class Request:
    """A request: its drafter, and its last draft by `ServingDrafter.draft`."""

    row: BatchRow
    kind: str
    tree: DraftTree = NO_DRAFT


class ServingDrafter:
    """Drafts for the requests of an engine that runs the model itself; any thread may call any method.

    Each request has a text of its own, which is never drafted into another's unless there is a session. Stores,
    calibration, phrases and the session are shared. Whatever is drafted, what is emitted is the engine's: a draft can
    cost time, never change a text.

    Parameters
    ----------
    config
        Limits of the drafts (`max_depth`, `min_path_probability`) and sources (`session`, `phrases`); the rest is of
        no meaning here. Dense indexes are not used.
    datastores
        Open stores to draft from.
    recycling
        Draft from the model's own top tokens and hidden states, which `step` is given (`seen`).
    vocabulary
        Tokens of the model: what has another number is never drafted. None: anything may be.
    state
        Folder in which calibration, phrases and the session are kept between runs, one for each model; made when there
        is none. It is written when a request ends, half a minute apart at least.

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
        recycling: bool = False,
        vocabulary: int | None = None,
        state: str | os.PathLike[str] | None = None,
    ) -> None:
        self.config = (config or SpeculationConfig()).with_options(dense="off", provenance=False)
        self.datastores, self.recycling = list(datastores), recycling
        self._distilled = ModelTables(self.datastores)
        self.vocabulary = vocabulary
        self.session = SessionMemory(self.config.session_tokens) if self.config.session else None
        self._folder = None if state is None else _open_folder(state)
        self._calibrations = _load_calibrations(self._folder)
        self._answers: AnswerMemory | None = None
        if self._folder is not None and self.session is not None:
            self._answers = _open_answers(self._folder / "session.bin", self.session.max_tokens)
            self.session.keep_in(self._answers, self._answers.key(""))
        self._saved = -float("inf")
        self._requests: dict[str, Request] = {}
        self._counts = dict.fromkeys(("requests", "steps", "rows", "drafted", "accepted", "emitted"), 0)
        self._lock = threading.RLock()
        self._costs = {GREEDY: Costs(), SAMPLED: Costs()}  # with sampling, vLLM processes the whole vocabulary
        self._backoff = Backoff(patience=_PATIENCE)
        self._drafted: tuple[CostModel, int, int] | None = None  # the step to be measured: cost model, nodes, context
        self._seconds = 0.0
        self._plan: NDArray[Any] = np.zeros(1, PLAN)
        self._plan["vocabulary"] = _ANY_TOKEN if vocabulary is None else vocabulary
        self._slots: Slots | None = None
        self._slots_of: tuple[object, object] = (None, None)
        self._kind = GREEDY
        self._rested = False  # whether the last step was not looked at

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of running requests, in the order they began."""
        with self._lock:
            return iter(list(self._requests))

    def prepare(self, shapes: Many[Shape] = ("chain", "tree")) -> None:
        """Compile the kernels, or load them from Numba's cache, before the first token depends on it.

        Parameters
        ----------
        shapes
            What will be asked for.
        """
        trial = ServingDrafter(self.config, datastores=self.datastores, recycling=self.recycling)
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

    def start(
        self,
        request: str,
        prompt_ids: NDArray[Any] | Many[int],
        *,
        prediction_ids: NDArray[Any] | Many[int] | None = None,
        sampled: bool = False,
    ) -> None:
        """Begin a request; other threads can continue theirs while a long prompt is read.

        Parameters
        ----------
        request
            Its name, for all other methods.
        prompt_ids
            (L,) token ids, L ≥ 1.
        prediction_ids
            (P,) token ids of a text that the answer is expected to repeat, if there is one.
        sampled
            Whether its tokens are sampled; how far drafts can be trusted is learned apart.

        Raises
        ------
        RequestError
            A request of that name is under way.
        PromptError
            The prompt or the prediction is no sequence of token ids, or the prompt has none.
        """
        prompt = token_ids_of(prompt_ids, "a prompt")
        prediction = None if prediction_ids is None else token_ids_of(prediction_ids, "a prediction")
        if not len(prompt):
            raise PromptError("a prompt of one token at least", "an empty one", "Start with what the model reads.")
        kind = SAMPLED if sampled else GREEDY
        learned = self._calibrations[kind]
        row = BatchRow(self.config, self.session, self.datastores, learned, self.recycling, self._distilled)
        row.start(prompt, prediction)  # may take a while for long prompts; others continue
        with self._lock:
            if request in self._requests:
                raise RequestError("a request that is not under way", repr(request), "Finish it, or use another name.")
            self._requests[request] = Request(row, kind)
            self._slots = None
            self._counts["requests"] += 1

    def length(self, request: str) -> int:
        """Return the number of tokens of a request, the prompt included.

        Raises
        ------
        RequestError
            No request of that name is under way.
        """
        with self._lock:
            return self._of(request).row.length

    def feed(self, request: str, token_ids: NDArray[Any] | Many[int], *, verified: int | None = None) -> int:
        """Append tokens to a request: the accepted tokens of its draft, and the model's next token.

        Parameters
        ----------
        token_ids
            (n,) token ids after those it has been given.
        verified
            How many nodes of the last draft, in order, the engine has verified; None for all, 0 where it took another
            way. What was not verified says nothing about how far drafts can be trusted.

        Returns
        -------
        int
            How many of the tokens the draft had foreseen.

        Raises
        ------
        RequestError
            No request of that name is under way.
        PromptError
            These are no token ids.
        """
        emitted = token_ids_of(token_ids, "tokens")
        with self._lock:
            state = self._of(request)
            if not len(emitted):
                return 0
            tree, state.tree = state.tree, NO_DRAFT
            if verified is not None and verified < len(tree):
                tree = tree.first(verified)
            path = tree.path_along(emitted)
            state.row.observe(VerifiedPass(tree, path, emitted))
            self._counts["accepted"] += len(path)
            self._counts["emitted"] += len(emitted)
            return len(path)

    def draft(
        self,
        requests: Many[str],
        max_nodes: int | Many[int],
        *,
        max_depth: int | Many[int] | None = None,
        shape: Shape = "chain",
    ) -> list[DraftTree]:
        """Draft continuations for all requests of the engine's next step.

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
        known = shape in ("chain", "tree")
        require(known, "shape 'chain' or 'tree'", shape, "Trees are for engines that verify branches.")
        nodes = _per_row(max_nodes, len(requests), "max_nodes")
        depths = _per_row(MAX_NODES if max_depth is None else max_depth, len(requests), "max_depth")
        with self._lock:
            rows = self._requests_of(requests)
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
        seen: Callable[[], SeenPass | None] | None = None,
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
        seen
            Returns what the model said in the step that verified the last drafts, the requests in this order; it is not
            called where nobody looks. Rows of anything else than these drafts are ignored.

        Returns
        -------
        list of list of int
            One for each request; empty ones where nothing is worth drafting.

        Raises
        ------
        RequestError
            A request is not under way, or named twice.
        ConfigError
            The arrays are of another kind, or what was seen has different numbers of rows.
        RequestDiverged
            A text does not go on from what its request was given; nothing was done.
        """
        began = perf_counter()
        with self._lock:
            slots = self._slots
            if slots is None or self._slots_of[0] is not requests or self._slots_of[1] is not texts:
                slots = self._fill_slots(requests, texts, lengths, places, longest, max_nodes)
            if any(lengths[place] > self._width for place in places):  # else a kernel would read past the row's end
                raise ConfigError(f"lengths up to {self._width}", f"{lengths[list(places)]}", "See `step`.")
            plan = self._plan
            if not requests:
                return slots.step(plan, lengths, _NO_COST)
            cost, context = self._cost_of(len(requests), self._kind), int(plan["context"][0])
            if self._goes_without(cost):
                slots.skip(plan)
                drafts: list[list[int]] = [[] for _ in requests]
                self._drafted, self._rested = (cost, 0, context), True
            else:
                seconds = _seconds(cost, context)
                said = None if seen is None or self._rested else _checked(seen())
                drafts = slots.step(plan, lengths, _NO_COST if seconds is None else seconds, said)
                self._rested = False
                self._note_step(cost, sum(map(len, drafts)), context, seconds)
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
        """Return rows for a step whose requests are not those of the last step.

        What compiled code will read is looked at here: it looks at nothing itself.
        """
        ours = texts.dtype == np.int32 == lengths.dtype and texts.strides[1:] == (4,)
        got, most = (texts.dtype, texts.shape, lengths.dtype), min(len(texts), len(lengths))
        require(ours, "texts (rows, positions) and lengths in int32, rows without gaps", got, "Copy them so.")
        inside = all(0 <= place < most for place in places)
        require(inside, f"places below {most}", list(places), "See `step`.")
        each = len(requests) == len(places) == len(longest)
        require(each, f"places and lengths for {len(requests)} requests", (len(places), len(longest)), "See `step`.")
        rows = self._requests_of(requests)
        begin, stride = texts.__array_interface__["data"][0], texts.strides[0]
        self._slots = Slots([state.row for state in rows], [begin + stride * i for i in places], places, longest)
        self._slots_of, self._kind = (requests, texts), _kind(rows)
        self._width = texts.shape[1]
        self._plan["deepest"] = min(max_nodes, self.config.max_depth, MAX_NODES)
        return self._slots

    def _draft(self, rows: Many[Request], nodes: Many[int], depths: Many[int], chains: bool) -> list[DraftTree]:
        context, cost_model = max(state.row.length for state in rows), self._cost_of(len(rows), _kind(rows))
        if self._goes_without(cost_model):
            self._drafted = cost_model, 0, context
            return [NO_DRAFT] * len(rows)
        seconds = _seconds(cost_model, context)

        def draft(limited: tuple[Request, int, int], _most: int, cost: Seconds | None) -> DraftTree:
            state, most, depth = limited
            # As in `step`, several rows draft as much as allowed; then the nodes that pay are chosen for all of them.
            tree = state.row.draft(Budget(most, depth, cost if len(rows) == 1 else None), chains)
            return tree if self.vocabulary is None else within(tree, self.vocabulary)

        limited = list(zip(rows, nodes, depths, strict=True))
        trees = draft_batch(limited, BatchBudget(seconds, MAX_NODES), draft)
        for state, tree in zip(rows, trees, strict=True):  # only skipped drafts are judged by their first token
            unknown = self.vocabulary is not None and state.row.first_token >= self.vocabulary
            if len(tree) or seconds is None or unknown:
                state.row.drop_first()
        self._note_step(cost_model, sum(map(len, trees)), context, seconds)
        return trees

    def _cost_of(self, rows: int, kind: str) -> CostModel:
        """Return the cost model of steps over that many rows, rounded up to a power of two."""
        return self._costs[kind].of(1 << (rows - 1).bit_length())

    def _goes_without(self, cost: CostModel) -> bool:
        """Return whether the next step has no drafts: they did not pay lately, or a step without them is measured."""
        return self._backoff.rests() or cost.needs_plain_pass

    def _note_step(self, cost: CostModel, nodes: int, context: int, seconds: Seconds | None) -> None:
        """Note what the next step verifies, and, if the cost model chose the nodes, whether drafting paid."""
        if seconds is not None:
            self._backoff.record_draft(nodes > 0)
        self._drafted = cost, nodes, context

    def measured(self, seconds: float) -> None:
        """Report the duration of the engine's step over the last drafts; not for steps that read prompts, too.

        From the first report on, nodes are drafted only where they pay.

        Raises
        ------
        ConfigError
            No step takes that long.
        """
        require(0.0 < seconds < float("inf"), "seconds above 0", seconds, "Measure from one draft to the next.")
        with self._lock:
            if self._drafted is not None:  # a second report of a step is ignored
                (cost, nodes, context), self._drafted = self._drafted, None
                cost.observe(nodes, context, seconds)

    def finish(self, request: str, *, keep: bool = True) -> None:
        """End a request and forget its text.

        Parameters
        ----------
        request
            Its name, which is free afterwards.
        keep
            Let the session, if there is one, and the phrases learn from what was generated; False for a request that
            was aborted, or that asked for it.

        Raises
        ------
        RequestError
            No request of that name is under way.
        """
        with self._lock:
            state = self._of(request)
            del self._requests[request]
            self._slots = None
            state.row.finish(keep)
            if perf_counter() - self._saved > _SAVE_EVERY:
                self.save()

    def abandon(self) -> None:
        """End all requests without learning from them."""
        with self._lock:
            self._requests.clear()
            self._slots = None

    def save(self) -> None:
        """Write what was learned to the state folder, if there is one."""
        with self._lock:
            self._saved = perf_counter()
            if self._folder is not None:
                for calibration in self._calibrations.values():
                    calibration.keep(at_once=True)
            if self._answers is not None:
                self._answers.keep(at_once=True)

    def statistics(self) -> dict[str, float]:
        """Return counts since the beginning.

        Returns
        -------
        dict
            `requests` begun, `steps` drafted for, `rows` of these steps, tokens `drafted`, `accepted` and `emitted`,
            `draft_seconds` spent in `draft`, requests `under_way`.
        """
        with self._lock:
            counts = dict(self._counts)
            for name in ("steps", "rows", "drafted", "accepted", "emitted"):
                counts[name] += int(self._plan[name][0])
            return {**counts, "draft_seconds": self._seconds, "under_way": len(self._requests)}

    def _of(self, request: str) -> Request:
        state = self._requests.get(request)
        if state is None:
            raise RequestError("a request that is under way", repr(request), "Start it first.")
        return state

    def _requests_of(self, requests: Many[str]) -> list[Request]:
        """Return running requests; raise `RequestError` for a name that is unknown or repeated."""
        if len(set(requests)) < len(requests):
            raise RequestError("each request once", f"{list(requests)}", "Ask for one draft of each.")
        return [self._of(request) for request in requests]


def _kind(requests: Many[Request]) -> str:
    """Return the kind of a step over these requests: sampled if any of them is."""
    return SAMPLED if any(state.kind == SAMPLED for state in requests) else GREEDY


def _seconds(cost: CostModel, context: int) -> Seconds | None:
    """Return the (MAX_NODES + 1,) seconds of a step with 0 … MAX_NODES nodes; None without measurements."""
    return cost.seconds(context, MAX_NODES) if cost.measured else None


def _checked(seen: SeenPass | None) -> SeenPass | None:
    """Return what was seen; raise `ConfigError` if kernels would read past the end of one of its arrays."""
    if seen is None:
        return None
    ids, logits, hidden = seen
    ours = ids.dtype == np.int32 and logits.dtype == np.float32 and ids.flags.c_contiguous and logits.flags.c_contiguous
    rows = ids.shape == logits.shape and (hidden is None or (hidden.ndim == 2 and len(hidden) == len(ids)))
    got = [None if part is None else (part.dtype, part.shape) for part in seen]
    require(ours and rows, "top tokens, logits and states of the same rows, without gaps", got, "See `SeenPass`.")
    return seen


def _per_row(value: int | Many[int], rows: int, name: str) -> list[int]:
    """Return a limit for each row; raise `ConfigError` for another number of limits."""
    values = [int(value)] * rows if isinstance(value, int | np.integer) else list(value)
    require(len(values) == rows, f"{name} for {rows} requests", values, "Give one number, or one for each.")
    return values


def _open_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the folder, created if needed; raise `ConfigError` if it cannot be."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("a folder to keep state in", in_a_line(error), "Name a folder that can be written.") from None
    return path


def _load_calibrations(folder: Path | None) -> dict[str, Calibration]:
    """Load the calibrations for greedy and sampled text, which share phrases; a damaged one begins anew."""
    found = {name: Calibration(None if folder is None else folder / f"{name}.npy") for name in (GREEDY, SAMPLED)}
    most = max(found.values(), key=lambda calibration: calibration.phrases.requests)
    for calibration in found.values():
        calibration.phrases = most.phrases
    return found


def _open_answers(path: Path, session_tokens: int) -> AnswerMemory:
    """Load the answers of earlier runs; a damaged file is logged and deleted."""
    try:
        return answers_by_scope(path, "", session_tokens)
    except RetrieveSpecError as error:
        logger.warning("the session starts anew: %s", in_a_line(error))
        with contextlib.suppress(OSError):
            path.unlink()
    return answers_by_scope(None if path.exists() else path, "", session_tokens)
