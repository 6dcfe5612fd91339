"""Tree corpus: draft trees of one width for the requests of a batch, in the arrays by which SGLang verifies them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.integrations.hosted import Hosted
from retrieve_spec.integrations.options import DRAFT, KEEP, wished
from retrieve_spec.integrations.serving import ServingDrafter, Shape
from retrieve_spec.kernels.batch import COMPARED


@dataclass(slots=True)
class _Seen:
    """A request as last seen: itself, if it still is, its answer, the end and number of its tokens, of its prompt's."""

    request: weakref.ref[Any]
    answer: Any
    end: NDArray[np.int64]
    length: int
    prompt: int
    drafts: bool
    keep: bool


class TreeCorpus:
    """Drafts for the requests of an engine that verifies trees of one width, whatever is worth drafting.

    A request is any object with `rid` (its name), `origin_input_ids_unpadded` and `output_ids` (its prompt and its
    answer so far, token ids), `sampling_params`, `input_embeds`, `is_retracted` and `finished()`. It is only looked at.

    Where there is less to draft than the width, trees are filled up with a path of tokens that nobody believes in,
    behind a leaf: so no two children of a node carry the same token, which a verifier that samples would count twice.

    Parameters
    ----------
    drafter
        What drafts.
    width
        Nodes of each tree, the text's last token included.
    shape
        `"tree"`, or `"chain"` where the engine's attention takes no branches.
    tokenizer
        Makes the model's tokenizer; called where a request gives its prediction as a text.
    """

    def __init__(self, drafter: ServingDrafter, width: int, shape: Shape, tokenizer: Callable[[], Any]) -> None:
        self.drafter = drafter
        self.width = width
        self.shape: Shape = shape
        self._tokenizer = tokenizer
        self._seen: dict[str, _Seen] = {}
        self._hosted = Hosted(drafter)
        self._hosted.ready(shape)

    def begin(self, requests: Iterable[Any]) -> None:
        """Begin requests whose prompts are being read, so that their first draft does not wait for that."""
        if self._hosted.is_off:
            return
        try:
            self.end_those_gone()
            for request in requests:
                if request.rid not in self._seen:
                    self._take(request, ())
        except Exception:
            self._failed()

    def trees(self, requests: Many[Any], latest: Many[Many[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Draft what follows the texts of a batch.

        Parameters
        ----------
        requests
            The batch.
        latest
            Tokens behind the answer of each that the engine has accepted and not written there yet.

        Returns
        -------
        token_ids
            (requests, width) int32, the text's last token and then the nodes.
        parent
            (requests, width) int32, -1 at the text's last token; parents come before their children.
        """
        drafts: list[DraftTree] = []
        if not self._hosted.is_off:
            try:
                drafts = self._draft(requests, latest)
            except Exception:  # a request is answered without drafts rather than not at all
                self._failed()
        token_ids = np.empty((len(requests), self.width), np.int32)
        parent = np.empty((len(requests), self.width), np.int32)
        for i, request in enumerate(requests):
            token_ids[i, 0] = (latest[i] or request.output_ids or request.origin_input_ids_unpadded)[-1]
            parent[i, 0] = -1
            _fill(token_ids[i], parent[i], drafts[i] if drafts else DraftTree())
        return token_ids, parent

    def _failed(self) -> None:
        self._hosted.failed()
        self._seen.clear()

    def _draft(self, requests: Many[Any], latest: Many[Many[int]]) -> list[DraftTree]:
        drafts = [DraftTree()] * len(requests)
        asked, nodes, depths = [], [], []
        for i, request in enumerate(requests):
            seen = self._take(request, latest[i])
            left = _left(request, len(latest[i])) - 1  # the last token is the model's own
            if seen.drafts and left > 0:
                asked.append(i)
                nodes.append(self.width - 1)
                depths.append(left)
        found = self.drafter.draft([requests[i].rid for i in asked], nodes, max_depth=depths, shape=self.shape)
        for i, tree in zip(asked, found, strict=True):
            drafts[i] = tree
        return drafts

    def _take(self, request: Any, latest: Many[int]) -> _Seen:
        """Give a request the tokens of its text that it has not been given, and begin it if it is new."""
        name = request.rid
        seen = self._seen.get(name)
        length = len(request.origin_input_ids_unpadded) + len(request.output_ids) + len(latest)
        if seen is not None:
            known = max(seen.length - COMPARED, 0)
            tail = _piece(request, latest, known)
            if length < seen.length or not (tail[: seen.length - known] == seen.end).all():
                self._forget(name, keep=False)  # tokens were taken back, or the name is another's
                seen = None
            elif seen.drafts:
                self.drafter.feed(name, tail[seen.length - known :])
        if seen is None:
            seen = self._seen[name] = self._begin(request, latest)
            tail = _piece(request, latest, max(length - COMPARED, 0))
        seen.request, seen.answer = weakref.ref(request), request.output_ids
        seen.end, seen.length = tail[-COMPARED:].copy(), length
        return seen

    def _begin(self, request: Any, latest: Many[int]) -> _Seen:
        name, parameters = request.rid, request.sampling_params
        said = getattr(parameters, "custom_params", None)
        wishes: Mapping[str, Any] = said if isinstance(said, Mapping) else {}
        drafts = request.input_embeds is None and wished(wishes, DRAFT)
        prompt = len(request.origin_input_ids_unpadded)
        if drafts:
            sampled = parameters.top_k != 1  # how SGLang writes a temperature of 0
            drafts = self._hosted.begin(name, _piece(request, latest, 0), prompt, wishes, self._tokenizer, sampled)
        nothing = np.empty(0, np.int64)
        return _Seen(weakref.ref(request), request.output_ids, nothing, 0, prompt, drafts, wished(wishes, KEEP))

    def end_those_gone(self) -> None:
        """Forget the requests that have ended, were aborted or wait to be read again; write what was learned."""
        gone = {name: seen for name, seen in self._seen.items() if _is_gone(seen.request())}
        for name, seen in gone.items():
            request = seen.request()
            ended = request is None or request.finished()
            if ended and seen.drafts:
                self.drafter.feed(name, np.asarray(seen.answer[seen.length - seen.prompt :], np.int64), verified=0)
            self._forget(name, seen.keep and ended)
        if gone:
            self._hosted.save_now_and_then()

    def _forget(self, name: str, keep: bool) -> None:
        self._seen.pop(name, None)
        self._hosted.end(name, keep)

    def reset(self) -> None:
        """Forget all requests; nothing is learned from them."""
        self._seen.clear()
        self.drafter.abandon()

    def statistics(self) -> dict[str, float]:
        """See `Hosted.statistics`."""
        return self._hosted.statistics()


def mask_of(parent: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Who looks at whom: (b, n, n) of the parents (b, n) of b trees, set where column j is node i or above it."""
    rows, width = parent.shape
    mask = np.zeros((rows, width, width), np.bool_)
    mask[:, 0, 0] = True
    every = np.arange(rows)
    for i in range(1, width):
        mask[:, i] = mask[every, parent[:, i]]
        mask[:, i, i] = True
    return mask


def _fill(token_ids: NDArray[np.int32], parent: NDArray[np.int32], tree: DraftTree) -> None:
    """Write a tree behind the token at the beginning of the two (width,) rows, and fill them up with a path.

    The path goes on behind the first leaf and says that its token comes again and again: a guess that costs nothing.
    """
    drafted = 1 + len(tree)
    token_ids[1:drafted] = tree.token_ids
    parent[1:drafted] = tree.parent + 1
    turns = np.flatnonzero(parent[1:drafted] != np.arange(drafted - 1))
    leaf = int(turns[0]) if len(turns) else drafted - 1
    token_ids[drafted:] = token_ids[leaf]
    parent[drafted:] = np.arange(drafted - 1, len(parent) - 1)
    parent[drafted : drafted + 1] = leaf


def _piece(request: Any, latest: Many[int], first: int) -> NDArray[np.int64]:
    """Tokens of a request's text from a position on."""
    prompt, answer = request.origin_input_ids_unpadded, request.output_ids
    behind = max(first - len(prompt), 0)
    parts = prompt[first:], answer[behind:], latest[max(behind - len(answer), 0) :]
    return np.concatenate([np.asarray(part, np.int64) for part in parts])


def _left(request: Any, latest: int) -> int:
    """Tokens that a request may still be given, `latest` of them being on their way."""
    limit = request.sampling_params.max_new_tokens
    return MAX_NODES if limit is None else min(limit - len(request.output_ids) - latest, MAX_NODES)


def _is_gone(request: Any) -> bool:
    return request is None or request.finished() or request.is_retracted
