"""Padded batch: several texts in one pass of a model's own forward, over keys and values padded to the longest text.

For models that are not recorded, such as those with recurrent state. In one cache the keys and values of each text are
aligned to the right, and its rows of the pass follow, aligned to the left. Masks hide the padding, positions are those
of the text, and each text keeps its recurrent state. After the pass each text has its rows back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from retrieve_spec.attention import row_depths
from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.errors import in_a_line
from retrieve_spec.kernels.treemask import fill_tree_mask
from retrieve_spec.model_layers import evaluating
from retrieve_spec.verify.cache import GROW_BY_ROWS, TAKE_TREES
from retrieve_spec.verify.comparison import drafts_for
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import LayerView, ModelInterface, catch_hidden, input_device, new_cache
from retrieve_spec.verify.pass_inputs import masks_by_type
from retrieve_spec.verify.recurrent import RecurrentState
from retrieve_spec.verify.shrink import lengths_of
from retrieve_spec.verify.steps import SingleSteps, prepare_call, sample_tokens
from retrieve_spec.verify.trials import read_prompt
from retrieve_spec.verify.verifier import VerifierOutput

logger = logging.getLogger(__name__)

PADDED_LAYERS = (*TAKE_TREES, LinearAttentionLayer)
"""Layers of caches that texts share passes over."""
_NOBODY = np.empty(0, np.bool_)
_REACH = 48
"""Longest window that trials of a shared pass exceed."""
_DEVIATION = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest difference between a shared pass and a lone one, as a share of the logits' spread."""


class PaddedBatch:
    """The passes that texts of one model share."""

    pads = True

    def __init__(self, model: Any, interface: ModelInterface) -> None:
        self.model, self.interface = model, interface
        self._device = input_device(model)
        self._state = None if interface.recurrence is None else RecurrentState(interface.recurrence)

    @staticmethod
    def can_share(text: HFVerifier) -> bool:
        """Whether a text that has read its prompt can share passes now."""
        known = all(type(layer) in PADDED_LAYERS for layer in text.cache.whole.layers)
        return text.mode == "tree" and text.is_plain_text and known

    def forward_all(
        self,
        texts: Sequence[HFVerifier],
        roots: Sequence[NDArray[np.int32]],
        trees: Sequence[DraftTree],
        want_hidden: Layer | None = None,
        keeps: Sequence[int] | None = None,
    ) -> list[VerifierOutput]:
        """Verify the trees of several texts in one pass; each commits for itself.

        Parameters
        ----------
        texts
            Verifiers that have read their prompts.
        roots, trees
            By text: tokens that are not in the cache yet, (m,), the last one being the root, and the draft below it.
        want_hidden
            Return the hidden states of this layer too.
        keeps
            Ignored: prompts are not read in such passes.

        Returns
        -------
        list
            For each text, what its own `forward` would have returned.
        """
        caches = [text.begin_shared() for text in texts]
        counts = [len(root) for root in roots]
        sizes = [count + len(tree) for count, tree in zip(counts, trees, strict=True)]
        columns, width = max(text.past for text in texts), max(sizes)
        whole = _side_by_side(caches, columns)
        kwargs = self._inputs(texts, roots, trees, whole, columns, width)
        drafts: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._state is not None:
            drafts = self._state.verifying(whole, caches, counts, trees, self._device)
        with catch_hidden(self.model, want_hidden) as hidden, drafts, texts[0].around():
            logits = self.model(**kwargs, return_dict=True).logits
        outputs = []
        for at, (text, cache, count, size) in enumerate(zip(texts, caches, counts, sizes, strict=True)):
            _take_rows(cache, whole, at, columns, size)
            text.end_shared(count, size - count, self._state, at)
            rows = slice(count - 1, size)
            outputs.append(VerifierOutput(logits[at, rows], hidden[-1][at, rows] if hidden else None))
        return outputs

    def _inputs(
        self,
        texts: Sequence[HFVerifier],
        roots: Sequence[NDArray[np.int32]],
        trees: Sequence[DraftTree],
        cache: DynamicCache,
        columns: int,
        width: int,
    ) -> dict[str, Any]:
        """Return the arguments of a pass."""
        ids = np.zeros((len(texts), width), np.int64)
        positions = np.zeros_like(ids)
        for at, (text, root, tree) in enumerate(zip(texts, roots, trees, strict=True)):
            rows = len(root) + len(tree)
            ids[at, :rows] = np.concatenate([root, tree.token_ids])
            positions[at, :rows] = row_depths(len(root), tree) + text.past + text.inputs.shift
        kwargs: dict[str, Any] = {
            "input_ids": torch.from_numpy(ids).to(self._device),
            "attention_mask": self._masks(texts, roots, trees, columns, width),
            "use_cache": True,
            self.interface.cache_name: cache,
        }
        if self.interface.takes_position_ids:
            kwargs["position_ids"] = torch.from_numpy(positions).to(self._device)
        return kwargs

    def _masks(
        self,
        texts: Sequence[HFVerifier],
        roots: Sequence[NDArray[np.int32]],
        trees: Sequence[DraftTree],
        columns: int,
        width: int,
    ) -> Any:
        """Every row sees its own tokens, its ancestors in the pass, and itself."""

        def visible(view: LayerView) -> torch.Tensor:
            mask = np.zeros((len(texts), width, columns + width), np.bool_)
            mask[:, np.arange(width), columns + np.arange(width)] = True  # a padding row sees itself
            for at, (text, root, tree) in enumerate(zip(texts, roots, trees, strict=True)):
                past, size = text.past, len(root) + len(tree)
                seen = np.empty((size, past + size), np.bool_)
                fill_tree_mask(
                    seen, tree.parent, tree.depth, len(root), past, 0, view.window, view.chunk, 0, _NOBODY
                )  # fmt: skip
                mask[at, :size, columns - past : columns + size] = seen
            return torch.from_numpy(mask)[:, None].to(self._device)

        return masks_by_type(self.interface, self.model.dtype, visible)


def _side_by_side(caches: Sequence[Any], columns: int) -> DynamicCache:
    """Copy the keys and values of texts into one cache, padded on the left; recurrent states stay where they are."""
    whole = DynamicCache()
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        if type(layers[0]) not in GROW_BY_ROWS:
            whole.layers.append(layers[0])  # for its type only; shared passes do not write to it
            continue
        layer = DynamicLayer()
        layer.lazy_initialization(layers[0].keys, layers[0].values)
        for name in ("keys", "values"):
            like = getattr(layers[0], name)
            together = like.new_zeros(len(caches), like.shape[1], columns, like.shape[3])
            for at, theirs in enumerate(layers):
                part = getattr(theirs, name)
                together[at, :, columns - part.shape[2] :] = part[0]
            setattr(layer, name, together)
        whole.layers.append(layer)
    return whole


def _take_rows(cache: Any, whole: DynamicCache, at: int, columns: int, size: int) -> None:
    """Give the cache of a text its own rows back, and its rows of the pass."""
    for theirs, layer in zip(cache.layers, whole.layers, strict=True):
        if type(theirs) in GROW_BY_ROWS:
            rows = slice(columns - theirs.keys.shape[2], columns + size)
            theirs.keys, theirs.values = layer.keys[at : at + 1, :, rows], layer.values[at : at + 1, :, rows]
            if isinstance(theirs, DynamicSlidingWindowLayer):
                theirs.cumulative_length += size


def why_not_shared(model: Any, interface: ModelInterface) -> str:
    """Return why texts of a model cannot share passes of its own forward; empty when they can."""
    recurrence = interface.recurrence
    if interface.mode != "tree" or not (interface.attends or interface.recurrent):
        return "it verifies no trees"
    if interface.recurrent and (recurrence is None or recurrence.way != "rows"):
        return "its recurrent state advances by single tokens"
    if any(type(layer) not in PADDED_LAYERS for layer in new_cache(model).layers):
        return "a layer of its cache holds a recurrent state and keys together"
    if interface.derives_positions or (interface.attends and interface.mask_form not in ("bool", "float")):
        return "its attention takes no positions and masks by row"
    longest = max(lengths_of(model.config).values(), default=0)
    if longest > _REACH or interface.rope_switch or interface.scale_step:
        return "what it computes depends on how long its longest text is"
    try:
        with evaluating(model), torch.no_grad():
            deviation = _deviation(model, interface, longest + 3)
            if not deviation <= _DEVIATION[model.dtype]:
                return f"a pass that texts share gives other logits than lone ones (off by {deviation:.2g})"
            if _reads_padding(model):
                return "what stands in front of a row as padding changes what its tokens see"
    except Exception as error:  # a model's own code may raise anything
        logger.debug("a shared pass failed", exc_info=True)
        return f"a pass that texts share fails ({in_a_line(error)})"
    return ""


def _reads_padding(model: Any) -> bool:
    """Whether padding in front of a text changes its logits, as it does where layers add a bias after the mask."""
    ids = sample_tokens(model, 11)
    shown = (torch.arange(9, device=ids.device) >= 4).long()[None]
    padded = SingleSteps.of(model, prepare_call(model, ids[:, :9], shown))
    alone = SingleSteps.of(model, prepare_call(model, ids[:, 4:9], torch.ones_like(ids[:, 4:9])))
    most = _DEVIATION[model.dtype]
    pairs = [(padded.feed(token), alone.feed(token)) for token in (None, *ids[0, 9:].tolist())]
    return not all(float((logits - wanted).abs().max() / wanted.std()) <= most for logits, wanted in pairs)


def _deviation(model: Any, interface: ModelInterface, length: int) -> float:
    """Return the largest difference between shared passes over three texts, which join and leave, and passes of their
    own over the same tokens, as a share of the logits' spread.
    """
    drafts, worst = drafts_for("tree", 2, model), 0.0
    batch = PaddedBatch(model, interface)
    lone, texts = ([HFVerifier(model, interface) for _ in range(3)] for _ in range(2))
    for verifiers in (lone, texts):
        for i, verifier in enumerate(verifiers):
            read_prompt(model, verifier, sample_tokens(model, max(length - 3 * i, 1), i))
    for turn, going in enumerate([(0, 1), (0, 1, 2), (2, 0), (0, 1, 2)]):
        tried = [drafts[turn + i] for i in going]
        trees = [DraftTree.from_paths(draft.paths) for draft in tried]
        roots = [np.array([draft.root], np.int32) for draft in tried]
        got = batch.forward_all([texts[i] for i in going], roots, trees)
        for i, root, tree, output, draft in zip(going, roots, trees, got, tried, strict=True):
            wanted = lone[i].forward(root, tree).logits.float()
            deviation = float((output.logits.float() - wanted).abs().max() / wanted.std(dim=-1).mean())
            worst = deviation if not deviation <= worst else worst
            for verifier in (lone[i], texts[i]):
                verifier.commit(np.array(draft.accepted, np.int32))
    for verifier in (*lone, *texts):
        verifier.finish()
    return worst
