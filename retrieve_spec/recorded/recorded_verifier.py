"""Recorded verifier: verifies draft trees, and reads prompts, with a recorded pass and a KV buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from retrieve_spec.attention import TreeMask, attend, attend_by_rows, row_depths, visible_rows
from retrieve_spec.config import PASS
from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree
from retrieve_spec.kernels.cpu import RowTexts, attends_fast_for_many
from retrieve_spec.recorded.kv_buffer import KVBuffer, cache_windows
from retrieve_spec.recorded.model_state import ModelState
from retrieve_spec.recorded.packed_pass import EXACT_ROWS, LaidOut, PackedPass, PassGraphs, packs, shape_of
from retrieve_spec.recorded.recorded_pass import ALL, Attend, RecordedPass
from retrieve_spec.sampling.acceptance import on_device
from retrieve_spec.verify.cache import same_rows
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.signatures import SignatureModes
from retrieve_spec.verify.verifier import Batching, Mode, PassKind, Ran, SharedPasses, VerifierInputs, VerifierOutput

PIECE = PASS.max_rows // 2
"""Prompt tokens of one recorded pass at most; in shared passes, too, so that both round alike."""
FEW = 32
"""So few tokens of a prompt are read by one pass: the model's own where it must begin, a recorded one after a cache."""
_NOTHING = np.empty(0, np.int32)
_ROOT, _ITSELF = row_depths(1, None), visible_rows(1, None)
"""Depths and mask of a pass over the root alone."""


class RecordedVerifier:
    """A `Verifier` whose passes cost little more than their arithmetic.

    The prompt is read by an `HFVerifier`. At the first pass after it the cache's rows move to slabs. Each further pass
    is one run of the recorded code, and `finish` puts the rows back into the cache that `start` was given. A generation
    that the recorded pass cannot serve is left to the `HFVerifier` entirely.
    """

    def __init__(
        self,
        model: Any,
        own: HFVerifier,
        recorded: RecordedPass,
        graphs: PassGraphs | None = None,
        state: ModelState | None = None,
    ) -> None:
        self.model = model
        self.pass_reason = ""
        """Why this generation does not use the recorded pass; empty when it does."""
        self.recorded, self._state = recorded, state
        self.own = own
        self._mask = TreeMask(recorded.groups, recorded.dtype, recorded.device)
        self._slabs: KVBuffer | None = None
        self._past = self._unread = self._pending = 0  # tokens: cached, to process, of the last pass
        self._cache: Any = None
        self._returns_cache = False
        self.graphs = graphs

    @property
    def whole_prompts(self) -> bool:
        """Whether the prompt must come in one piece, as one with pictures must."""
        return self.own.whole_prompts

    @property
    def mode(self) -> Mode:
        """What `forward` accepts now: nothing where passes are to be exact and this generation's are not recorded."""
        return "plain" if self.recorded.exact and self.pass_reason else self.own.mode

    @property
    def most_rows(self) -> int:
        """Root tokens and draft nodes of one pass at most."""
        if self.pass_reason:
            return self.own.most_rows
        return EXACT_ROWS if self.recorded.exact and self.recorded.device.type != "cpu" else PASS.tree_rows

    @property
    def reason(self) -> str:
        """Why the mode is not "tree"; empty when it is."""
        return self.pass_reason if self.recorded.exact and self.pass_reason else self.own.reason

    @property
    def pass_kind(self) -> PassKind:
        """What runs the model in this generation."""
        return self.own.pass_kind if self.pass_reason else "recorded"

    def start(self, inputs: VerifierInputs) -> None:
        """Begin a generation."""
        self.own.start(inputs)
        self._slabs = None
        self._max_length, self._returns_cache = inputs.max_length, inputs.returns_cache
        self._past = inputs.past_length
        self._unread = inputs.num_uncached
        self._cache = inputs.model_kwargs.get(self.own.interface.cache_name)
        positions = inputs.model_kwargs.get("position_ids")
        self._shift = self.own.inputs.shift
        self._in_a_row = positions is None or bool((positions.diff() == 1).all())  # no padding inside
        self.pass_reason = self._why_not()

    def fresh(self, state: ModelState | None = None, signatures: SignatureModes | None = None) -> RecordedVerifier:
        """Another verifier of the same recording, for another text.

        It refuses a model that is no longer in `state`. `signatures` is that of `HFVerifier`, None for this verifier's.
        """
        own = self.own.fresh()
        own.signatures = signatures or own.signatures
        return RecordedVerifier(self.model, own, self.recorded, self.graphs, state or self._state)

    def _why_not(self) -> str:
        """Return why a generation is left to the verifier of the model's own forward; empty where it is not."""
        if why := self.own.reason if self.own.mode != "tree" else self.own.why_not_text:
            return why
        interface = self.own.interface
        if interface.rope_rescans and self._past + self._unread > interface.rope_switch:
            return "the text is longer than those whose rotary frequencies were recorded"
        if not self.own.inputs.shifts_alike:
            return "positions differ from axis to axis"
        if self._cache is not None and not self.recorded.continues(self._cache):
            return "the cache holds numbers of another format"
        if self._state is not None and not self._state.holds():
            return "the model has changed since this generation was set up"
        return ""

    def forward(
        self,
        root_ids: NDArray[np.int32],
        tree: DraftTree | None = None,
        *,
        keep: int = 1,
        want_hidden: Layer | None = None,
    ) -> VerifierOutput:
        """Run one pass (`Verifier.forward`)."""
        roots = self._pending = len(root_ids)
        if want_hidden not in (None, self.recorded.layer) and self._slabs is None:
            self.pass_reason = self.pass_reason or f"hidden states of layer {want_hidden} are not recorded"
        if self.pass_reason or (self._unread > 0 and not self._reads(roots, keep)):
            least = max(keep, min(self.recorded.exact, roots))  # with at least so many rows, sums have a fixed order
            output = self.own.forward(root_ids, tree, keep=least, want_hidden=want_hidden)
            rows = slice(least - keep, None)
            return VerifierOutput(output.logits[rows], None if output.hidden is None else output.hidden[rows])
        with on_device(self.recorded.device):
            earlier: list[VerifierOutput] = []
            if self._unread > 0:
                root_ids, earlier = self._read(root_ids, keep, want_hidden)
            output = forward_together([self], [root_ids], [tree or NO_DRAFT], want_hidden, [keep])[0]
            return _joined([*earlier, output])

    def _reads(self, roots: int, keep: int) -> bool:
        """Whether the recorded pass reads this part of the prompt; a prompt that it has begun it reads to the end."""
        if self._slabs is not None or self.reads_rest(roots):
            return True
        if not self._begins and roots <= max(FEW, keep):  # logits of its first token may be needed
            return False
        if self.graphs is not None:
            return roots <= PASS.graph_rows[-1] or self._in_a_row
        return self.recorded.reads_prompts and self._follows_the_cache

    def reads_rest(self, roots: int) -> bool:
        """Whether one pass can read the last few tokens of a prompt and a draft, after the rows that the cache came
        with.
        """
        is_the_rest = self._past > 0 and roots == self._unread <= FEW
        return not self.pass_reason and is_the_rest and self._follows_the_cache

    @property
    def _follows_the_cache(self) -> bool:
        """Whether the prompt's rows simply follow those of the cache: no padding in between, no windows."""
        return self._in_a_row and not self.recorded.exact and not any(cache_windows(self._cache))

    batching: Batching = "packed"

    def share(self, passes: SharedPasses) -> None:
        """Share padded passes with others; packed ones are always shared."""

    def shared_passes(self, is_reading: bool, want_hidden: Layer | None = None) -> SharedPasses | None:
        """See `Verifier.shared_passes`."""
        if self.pass_reason or (is_reading and not self.packs_prompts):
            return None
        return PackedPasses(self.recorded) if want_hidden in (None, self.recorded.layer) else None

    @property
    def packs_prompts(self) -> bool:
        """Whether its prompt can be read in passes with those of others.

        Where rows are the same bit for bit in any pass, only if recorded passes would also read it alone.
        """
        alike = self.recorded.reads_prompts or not self.recorded.attends_rows
        return alike and self._begins and not self.recorded.exact

    @property
    def _begins(self) -> bool:
        """Whether recorded passes can read its prompt from where its cache ends."""
        if self.pass_reason or not self._in_a_row:
            return False
        return self._slabs is not None or self._past > 0 or len(self._cache.layers) == len(self.recorded.rules)

    def _read(
        self, prompt_ids: NDArray[np.int32], keep: int, want_hidden: Layer | None
    ) -> tuple[NDArray[np.int32], list[VerifierOutput]]:
        """Read all but the last piece of a part of the prompt; where a cache has no layers yet the model begins.

        Return that piece, and the outputs of those of the last `keep` rows that are in earlier ones.
        """
        if self._past == 0 and not self._begins:
            self.own.forward(prompt_ids[:1])
            self.own.commit(_NOTHING)
            self._past, self._unread, prompt_ids = 1, self._unread - 1, prompt_ids[1:]
        most = PIECE if self.graphs is None else PASS.graph_rows[-1]
        kept: list[VerifierOutput] = []
        while len(prompt_ids) > most:
            piece, prompt_ids = prompt_ids[:most], prompt_ids[most:]
            count = max(keep - len(prompt_ids), 0)
            output = forward_together([self], [piece], [NO_DRAFT], want_hidden, [max(count, 1)])[0]
            if count:
                states = None if output.hidden is None else output.hidden.clone()
                kept.append(VerifierOutput(output.logits.clone(), states))  # the next pass may write over the others
            self._past, self._unread = self._past + most, self._unread - most
        self._pending = len(prompt_ids)
        return prompt_ids, kept

    def lay_out(self, root_ids: NDArray[np.int32], tree: DraftTree) -> LaidOut:
        """Make cache and mask ready for a pass over root tokens and a tree."""
        self._pending = len(root_ids)
        if self._slabs is None:
            self._slabs = self._adopt()
        slabs = self._slabs
        ids = root_ids if not len(tree) else np.concatenate([root_ids, tree.token_ids])
        depths, seen = (_ROOT, _ITSELF) if len(ids) == 1 else (row_depths(len(root_ids), tree), None)
        self._mask.set(self._past, visible_rows(len(root_ids), tree) if seen is None else seen, depths)
        slabs.length = self._past
        slabs.make_room(len(ids))
        return LaidOut(ids, depths, self._mask.seen, self._past + self._shift, slabs, self._past, len(tree) > 0)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
        """Write a layer's keys and values for the pass that `lay_out` prepared, and attend to all of them."""
        return self._attend(attend_by_rows if self.recorded.exact else attend, query, keys, values, layer)

    def attend_by_rows(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
        """Do what `attend` does, for each row by itself."""
        return self._attend(attend_by_rows, query, keys, values, layer)

    def _attend(
        self,
        attention: Callable[..., torch.Tensor],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        assert self._slabs is not None
        all_keys, all_values = self._slabs.update(keys, values, layer)
        return attention(query, all_keys, all_values, self._mask, self.recorded.rules[layer])

    def _adopt(self) -> KVBuffer:
        """Move the prompt's rows from the caller's cache to slabs."""
        self._cache = self.own.cache.whole
        held = self._past + self._unread
        room = min(self._max_length, held + max(held // 16, PASS.cache_block)) + PASS.tree_rows
        room, windows = max(room, held + PASS.cache_block), cache_windows(self._cache)
        slabs = KVBuffer(windows, room, moves_later=self.graphs is not None)
        if self._past:
            slabs.load(self._cache, self._past)
        else:
            slabs.restart(self.recorded.no_states())
        return slabs

    def commit(self, path: NDArray[np.int32]) -> None:
        """Keep the root tokens and the nodes of `path` (`Verifier.commit`)."""
        if self._slabs is None:
            self.own.commit(path)
        else:
            self._slabs.commit(self._past, self._pending, path)
        self._past, self._unread = self._past + self._pending + len(path), max(self._unread - self._pending, 0)

    def copy_rows(self) -> DynamicCache | None:
        """Return a cache of the same rows, which nothing writes to (`HFVerifier.copy_rows`)."""
        if self._slabs is None:
            return self.own.copy_rows()
        twin = same_rows(self._cache)
        self._slabs.unload(twin, self._past, copy=True)
        return twin

    def finish(self) -> Any:
        """Put the rows back into the cache this generation was given, and return it; None when nobody asks for it."""
        if self._slabs is not None:
            if self._returns_cache:
                self._slabs.unload(self._cache, self._past)
            self._slabs = None
        self._cache = None
        cache = self.own.finish()
        return cache if self._returns_cache else None


def _joined(outputs: Sequence[VerifierOutput]) -> VerifierOutput:
    """Return the rows of several outputs as one."""
    *earlier, last = outputs
    if not earlier:
        return last
    states = None if last.hidden is None else torch.cat([each.hidden for each in outputs if each.hidden is not None])
    return VerifierOutput(torch.cat([each.logits for each in outputs]), states, last.ran)


@dataclass(frozen=True, slots=True)
class PackedPasses:
    """Recorded passes over the texts of several verifiers, one after the other."""

    recorded: RecordedPass

    @property
    def pads(self) -> bool:
        """Whether each text takes as many rows as the widest: no."""
        return False

    def forward_all(
        self,
        verifiers: Sequence[RecordedVerifier],
        roots: Sequence[NDArray[np.int32]],
        trees: Sequence[DraftTree],
        want_hidden: Layer | None = None,
        keeps: Sequence[int] | None = None,
    ) -> list[VerifierOutput]:
        """See `SharedPasses.forward_all`."""
        return forward_together(verifiers, roots, trees, want_hidden, keeps)


def forward_together(
    verifiers: Sequence[RecordedVerifier],
    roots: Sequence[NDArray[np.int32]],
    trees: Sequence[DraftTree],
    want_hidden: Layer | None,
    keeps: Sequence[int] | None = None,
) -> list[VerifierOutput]:
    """Verify the trees of several texts in one pass, or read their prompts; each keeps its cache, commits for itself.

    The recorded operations treat each row of the pass by itself, so the texts follow each other without padding; only
    the attention tells them apart. Texts with different kinds of attention take a pass per kind, so that a text's
    results do not depend on the others.

    Parameters
    ----------
    verifiers
        By text; they share a recording.
    roots, trees
        By text: the last token, (1,), or a part of the prompt, (m,), and the draft below it.
    want_hidden
        Return the hidden states of this layer too.
    keeps
        By text, how many of its last root tokens to return logits and states for; None for all.

    Returns
    -------
    list
        By text, what its own `forward` would have returned.
    """
    laid = [v.lay_out(root, tree) for v, root, tree in zip(verifiers, roots, trees, strict=True)]
    counts = [len(text.ids) for text in laid]
    if keeps is not None:
        counts = [min(keep, len(root)) + len(tree) for keep, root, tree in zip(keeps, roots, trees, strict=True)]
    recorded, outputs = verifiers[0].recorded, dict[int, VerifierOutput]()
    by_attention: dict[bool, list[int]] = {}
    for i, text in enumerate(laid):
        by_attention.setdefault(_attends_rows(recorded, text), []).append(i)
    with on_device(recorded.device):
        for texts in by_attention.values():
            part = [verifiers[i] for i in texts], [laid[i] for i in texts], [counts[i] for i in texts]
            outputs.update(zip(texts, _forward_laid(*part, want_hidden), strict=True))
    return [outputs[i] for i in range(len(laid))]


def _forward_laid(
    verifiers: Sequence[RecordedVerifier], laid: Sequence[LaidOut], counts: Sequence[int], want_hidden: Layer | None
) -> list[VerifierOutput]:
    """Run one pass over texts with the same kind of attention; return outputs of the last `counts` rows of each."""
    recorded, ends = verifiers[0].recorded, np.cumsum([len(text.ids) for text in laid]).tolist()
    wanted = None
    if sum(counts) < ends[-1]:
        wanted = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    logits, hidden, ran = run_pass(recorded, laid, [v.attend for v in verifiers], wanted, verifiers[0].graphs)
    spreads = recorded.device.type == "cpu" and not recorded.attends_rows
    if spreads and any(text.drafts for text in laid) and bool(logits[:, 0].isnan().any()):
        # A drafted row overflowed, and torch's attention spreads infinities to rows that do not see it.
        alone = [verifier.attend_by_rows for verifier in verifiers]
        logits, hidden, ran = run_pass(recorded, laid, alone, wanted, None)
    outputs, begin = [], 0
    for end, count in zip(ends, counts, strict=True):
        states = None if want_hidden is None else hidden[end - count : end]
        outputs.append(VerifierOutput(logits[begin : begin + count], states, ran))
        begin += count
    return outputs


def _attend_apart(laid: Sequence[LaidOut], parts: Sequence[Attend]) -> Attend:
    """Attention of a pass over several texts, each by its own (`RecordedVerifier.attend`)."""
    rows = [len(text.ids) for text in laid]

    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
        by_text = zip(parts, *(torch.split(every, rows, 2) for every in (query, keys, values)), strict=True)
        return torch.cat([part(*own, layer) for part, *own in by_text], dim=1)

    return attend


def run_pass(
    recorded: RecordedPass,
    laid: Sequence[LaidOut],
    attend: Sequence[Attend],
    wanted: NDArray[np.int64] | None,
    graphs: PassGraphs | None,
) -> tuple[torch.Tensor, torch.Tensor, Ran]:
    """Run a pass over the rows of some texts with the same kind of attention, one after the other.

    Parameters
    ----------
    recorded
        The recorded pass.
    laid
        By text, its part of the pass.
    attend
        By text, its own attention in a layer.
    wanted
        Rows whose logits are wanted, ascending; None for all.
    graphs
        Captured passes.

    Returns
    -------
    logits
        (wanted, vocab), valid until the next pass.
    hidden
        (rows, d), of all rows.
    ran
        How it was run.
    """
    if graphs is not None and (replayed := graphs.run(laid, wanted)) is not None:
        return replayed
    rows = sum(len(text.ids) for text in laid)
    if recorded.device.type != "cpu" and packs(recorded, laid):
        shape = shape_of(recorded, laid, rows, len(laid), 0 if wanted is None else len(wanted))
        packed = PackedPass(recorded, laid[0].cache, shape)
        packed.fill(laid, wanted)
        packed.run()
        return (*packed.outputs, Ran.EAGER)
    ids = np.concatenate([text.ids for text in laid]).astype(np.int64)
    positions = np.concatenate([text.depths + text.position for text in laid])
    together: Attend | RowTexts
    if _attends_rows(recorded, laid[0]):
        together = _row_texts(laid)
    else:
        together = attend[0] if len(laid) == 1 else _attend_apart(laid, attend)
    some: slice | torch.Tensor = ALL
    if wanted is not None:
        ends_it = len(wanted) == rows - wanted[0]
        some = slice(int(wanted[0]), None) if ends_it else _to(recorded, wanted)
    logits, hidden = recorded.run(_to(recorded, ids[None]), _to(recorded, positions[None]), together, some)
    return logits[0], hidden[0], Ran.EAGER


_FEW_ROWS = 64
"""Rows of a text up to which a recorded pass uses its own attention although torch's is faster for many."""


def _attends_rows(recorded: RecordedPass, text: LaidOut) -> bool:
    """Whether a pass uses its own attention for a text, whatever other texts share the pass.

    For drafts it always does, so that they change no bit, and so do exact passes.
    """
    if not recorded.attends_rows or text.cache.host_dtype != recorded.row_dtype:
        return False
    if recorded.exact or text.drafts:
        return True
    return attends_fast_for_many(recorded.row_dtype) or len(text.ids) <= _FEW_ROWS


def _row_texts(laid: Sequence[LaidOut]) -> RowTexts:
    """Return the texts of a pass for row programs."""
    return RowTexts(
        [len(text.ids) for text in laid],
        [text.seen for text in laid],
        [text.depths for text in laid],
        [_places(text) for text in laid],
    )


def _places(text: LaidOut) -> NDArray[np.int64]:
    """Return (layers, 4): addresses of keys and of values, capacity, and rows held."""
    cache = text.cache
    places = np.empty((len(cache.addresses), 4), np.int64)
    places[:, :3] = cache.addresses
    places[:, 3] = np.array([text.held - slab.offset for slab in cache.slabs])[cache.slab_of]
    return places


def _to(recorded: RecordedPass, numbers: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(numbers).to(recorded.device, non_blocking=True)
