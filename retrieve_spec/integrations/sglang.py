"""SGLang: a speculative algorithm that drafts trees for SGLang's requests, through its door for plug-ins.

::

    RETRIEVE_SPEC_SGLANG='{"datastores": ["stores/code"], "state": "state/my-model"}' \\
        python -m sglang.launch_server --model-path MODEL --speculative-algorithm RETRIEVE_SPEC

SGLang finds `register` by its entry point in every process and asks the registered algorithm what it would ask its own
`NGRAM`; the worker is SGLang's n-gram worker with other drafts. Nothing of SGLang is changed, and nothing of it is
imported before it asks.
"""

from __future__ import annotations

import json
import os
import types
import weakref
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES, SpeculationConfig
from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree
from retrieve_spec.errors import ConfigError, require
from retrieve_spec.integrations.hosted import Hosted, Options
from retrieve_spec.integrations.serving import Shape

TESTED = ("0.5.23",)
"""Versions of SGLang that are tested."""
NAME = "RETRIEVE_SPEC"
"""Value of `--speculative-algorithm`."""
PLACE = "RETRIEVE_SPEC_SGLANG"
"""Environment variable with the options as a JSON object, because SGLang's arguments cannot contain them."""
_OWN = frozenset({"from_string", "register", "create_worker", "handle_server_args"})
"""What the built-in algorithm is not asked for."""
_DEVICES = ("cuda", "cpu", "xpu")
_REMEDY = f"""Install one of these, or set {PLACE}='{{"any_version": true}}'."""
_SPARE = 64
"""Nodes of the unused n-gram trie that SGLang's worker makes; its default takes a gigabyte."""


def register() -> None:
    """Register the algorithm in this process; SGLang calls it as a plug-in."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    make_known = SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, validate_server_args=validate, spec_class=algorithm_class()
    )
    make_known(worker_class)


def options() -> Options:
    """Return the user's options.

    Raises
    ------
    ConfigError
        They are no JSON, or no object of known options.
    """
    written = os.environ.get(PLACE, "{}")
    try:
        given = json.loads(written)
    except ValueError:
        raise ConfigError(f"an object in JSON in {PLACE}", repr(written), "Write it as one.") from None
    return Options.of(given, PLACE, min_path_probability=SpeculationConfig().min_path_probability)


def validate(server_args: Any) -> None:
    """Raise an error for unsupported arguments, before a model is loaded.

    Raises
    ------
    ConfigError
        This version of SGLang was never tested, an option is wrong, or arguments of the server cannot go together.
    """
    options().check_version("SGLang", ("sglang",), TESTED, _REMEDY)
    corpus, device = server_args.speculative_ngram_external_corpus_path, server_args.device
    width, stages = server_args.speculative_num_draft_tokens, server_args.pp_size
    widths = f"--speculative-num-draft-tokens 2 … {MAX_NODES + 1}"
    for right, expected, got, remedy in (
        (corpus is None, "no external corpus", corpus, f"Build a store, and name it as datastores in {PLACE}."),
        (device in _DEVICES, f"--device {', '.join(_DEVICES)}", device, "Serve without drafts there."),
        (width is None or 2 <= width <= MAX_NODES + 1, widths, width, "12 is the default."),
        (stages == 1, "--pp-size 1", stages, "Use tensor or data parallelism."),
    ):
        require(right, expected, got, remedy)


def handle_server_args(algorithm: Any, server_args: Any) -> None:
    """Set the same arguments, with the same defaults, as SGLang's own n-gram algorithm."""
    if server_args.device == "cpu":
        server_args.disable_overlap_schedule = True
    if server_args.max_running_requests is None:
        server_args.max_running_requests = 48
    server_args.enable_mixed_chunk = False
    server_args.speculative_eagle_topk = server_args.speculative_ngram_max_bfs_breadth
    if server_args.speculative_num_draft_tokens is None:
        server_args.speculative_num_draft_tokens = 12
    if server_args.speculative_num_steps is None:
        width, breadth = server_args.speculative_num_draft_tokens, server_args.speculative_eagle_topk
        server_args.speculative_num_steps = width // breadth
    server_args.speculative_ngram_capacity = _SPARE


def algorithm_class() -> type:
    """Return the class that SGLang queries about the algorithm; it answers as `NGRAM` would."""
    from sglang.srt.speculative.spec_info import CustomSpecAlgo, SpeculativeAlgorithm

    answers = {
        name: staticmethod(getattr(SpeculativeAlgorithm.NGRAM, name))
        for name, value in vars(SpeculativeAlgorithm).items()
        if isinstance(value, types.FunctionType) and not name.startswith("_") and name not in _OWN
    }
    return type("RetrieveSpecAlgorithm", (CustomSpecAlgo,), {**answers, "handle_server_args": handle_server_args})


def worker_class(server_args: Any) -> type:
    """Return SGLang's n-gram worker with drafts of this library.

    Raises
    ------
    ConfigError
        The server attends in a way that SGLang cannot verify trees with, or divides attention over ranks.
    """
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.runtime_context import attn_dp_enabled_of
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    view = resolved_view(server_args)
    if view.speculative_eagle_topk > 1 and view.page_size > 1 and view.attention_backend != "flashinfer":
        got = f"{view.attention_backend} with --page-size {view.page_size}"
        remedy = "Change one, or draft chains: --speculative-ngram-max-bfs-breadth 1."
        raise ConfigError("pages of one token, or flashinfer, for trees", got, remedy)
    if attn_dp_enabled_of(view):
        raise ConfigError("attention in one piece", "data-parallel attention", "Leave it off, or the drafts.")
    return type("RetrieveSpecWorker", (Drafting, NGRAMWorker), {})


class Drafting:
    """Mixin before SGLang's `NGRAMWorker`: drafts from whole texts.

    The first rank of a group drafts and tells the others, so that all verify the same.
    """

    enable_overlap: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from sglang.srt.runtime_context import get_parallel

        worker: Any = self
        parallel = get_parallel()
        self._group, self._width = parallel.tp_group, int(worker.draft_token_num)
        self.ngram_corpus: Corpus = Corpus()
        if self._group.rank_in_group == 0:
            tokenizer = partial(_tokenizer_of, worker.target_worker)
            shape: Shape = "tree" if worker.topk > 1 else "chain"
            vocabulary = int(worker.model_runner.model_config.vocab_size)
            hosted = Hosted(options(), shape, tokenizer, vocabulary, parallel.dp_rank)
            self.ngram_corpus = TreeCorpus(hosted, self._width, shape)

    def _prepare_draft_tokens(self, batch: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return token ids (b · K,) and visibility (b · K · K,), as the n-gram worker does."""
        drafted = np.empty((2, len(batch.reqs), self._width), np.int32)
        if isinstance(self.ngram_corpus, TreeCorpus):
            drafted[:] = self.ngram_corpus.trees(batch.reqs, self._accepted_last(batch))
        if self._group.world_size > 1:
            import torch  # all ranks need the first rank's drafts

            torch.distributed.broadcast(
                torch.from_numpy(drafted), src=self._group.first_rank, group=self._group.cpu_group
            )
        token_ids, parent = drafted
        return token_ids.astype(np.int64).ravel(), mask_of(parent).astype(np.int64).ravel()

    def _accepted_last(self, batch: Any) -> list[list[int]]:
        """Return the tokens of each request that the last step accepted and its answer does not have yet.

        So it is where SGLang looks at a step's result while the next one runs.
        """
        if not self.enable_overlap or batch.grammar_needs_sync():
            return [[]] * len(batch.reqs)
        ids = batch.spec_info.accept_tokens.reshape(-1, self._width).tolist()
        return [tokens[:length] for tokens, length in zip(ids, batch.spec_info.accept_lens.tolist(), strict=True)]

    def _update_ngram_corpus(self, batch: Any) -> None:
        """Drop ended requests while the model runs. Accepted tokens are learned with the next draft."""
        self.ngram_corpus.end_those_gone()


class Corpus:
    """Replaces the n-gram corpus of SGLang's worker on ranks that do not draft."""

    def end_those_gone(self) -> None:
        """End the requests that are finished, aborted or retracted; write what was learned."""

    def erase_match_state(self, req_ids: list[str]) -> None:
        """Do nothing: it is not known yet how the requests ended; `end_those_gone` finds out."""

    def reset(self) -> None:
        """End all requests without learning from them."""


@dataclass(slots=True)
class _Seen:
    """A request as last seen: itself, if it still exists, its answer, how many tokens that had, and those after it."""

    request: weakref.ref[Any]
    answer: Any
    drafts: bool
    written: int = 0
    latest: Many[int] = ()


class TreeCorpus(Corpus):
    """Drafts for the requests of a batch: trees of one width.

    A request has `rid` (its name), `origin_input_ids_unpadded` and `output_ids` (its prompt and its answer so far,
    token ids), `sampling_params`, `input_embeds`, `is_retracted` and `finished()`. It is only looked at.

    Where there is less to draft than the width, trees are filled up with a path of tokens that nobody believes in,
    after a leaf: so no two children of a node carry the same token, which a verifier that samples would count twice.

    Parameters
    ----------
    hosted
        What drafts.
    width
        Nodes of each tree, the text's last token included.
    shape
        `"tree"`, or `"chain"` where the engine's attention takes no branches.
    """

    def __init__(self, hosted: Hosted, width: int, shape: Shape) -> None:
        self.width, self.shape = width, shape
        self._seen: dict[str, _Seen] = {}
        self._hosted = hosted
        self.drafter, self.statistics = hosted.drafter, hosted.statistics

    def trees(self, requests: Many[Any], latest: Many[Many[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Draft continuations of a batch's texts.

        Parameters
        ----------
        requests
            The batch.
        latest
            Tokens after the answer of each that the engine has accepted and not written there yet.

        Returns
        -------
        token_ids
            (requests, width) int32, the text's last token and then the nodes.
        parent
            (requests, width) int32, -1 at the text's last token; parents come before their children.
        """
        drafts: dict[int, DraftTree] = {}
        if not self._hosted.is_off:
            try:
                drafts = self._draft(requests, latest)
            except Exception:  # continue without drafts
                self._hosted.failed()
                self._seen.clear()
        token_ids, parent = np.empty((2, len(requests), self.width), np.int32)
        for i, request in enumerate(requests):
            token_ids[i, 0] = (latest[i] or request.output_ids or request.origin_input_ids_unpadded)[-1]
            parent[i, 0] = -1
            _fill(token_ids[i], parent[i], drafts.get(i, NO_DRAFT))
        return token_ids, parent

    def _draft(self, requests: Many[Any], latest: Many[Many[int]]) -> dict[int, DraftTree]:
        """Return the trees of requests that are drafted for, by their place in the batch."""
        depths: dict[int, int] = {}
        for i, request in enumerate(requests):
            limit = request.sampling_params.max_new_tokens
            left = MAX_NODES if limit is None else limit - len(request.output_ids) - len(latest[i])
            if self._take(request, latest[i]).drafts and left > 1:  # the last token comes from the model
                depths[i] = min(left - 1, MAX_NODES)
        names, nodes = [requests[i].rid for i in depths], [self.width - 1] * len(depths)
        found = self.drafter.draft(names, nodes, max_depth=list(depths.values()), shape=self.shape)
        return dict(zip(depths, found, strict=True))

    def _take(self, request: Any, latest: Many[int]) -> _Seen:
        """Append new tokens of a text to its request, and begin it if it is new."""
        answer, seen = request.output_ids, self._seen.get(request.rid)
        if seen is not None:
            following = [*answer[seen.written :], *latest]
            if seen.request() is not request or following[: len(seen.latest)] != list(seen.latest):
                self._forget(request.rid, False)  # tokens were removed, or the name was reused
                seen = None
        if seen is None:
            said = getattr(request.sampling_params, "custom_params", None)
            drafts = request.input_embeds is None and self._hosted.begin(
                request.rid,
                request.origin_input_ids_unpadded,
                said if isinstance(said, Mapping) else {},
                request.sampling_params.top_k != 1,  # SGLang's form of temperature 0
            )
            seen = _Seen(weakref.ref(request), answer, drafts)
            self._seen[request.rid], following = seen, [*answer, *latest]
        if seen.drafts:
            self.drafter.feed(request.rid, following[len(seen.latest) :])
        seen.answer, seen.written, seen.latest = answer, len(answer), latest
        return seen

    def end_those_gone(self) -> None:
        """End the requests that are finished, aborted or retracted; write what was learned."""
        for name, seen in list(self._seen.items()):
            request = seen.request()
            ended = request is None or request.finished()
            if ended and seen.drafts:
                self.drafter.feed(name, seen.answer[seen.written + len(seen.latest) :], verified=0)
            if ended or (request is not None and request.is_retracted):
                self._forget(name, ended)

    def _forget(self, name: str, keep: bool) -> None:
        self._seen.pop(name, None)
        self._hosted.end(name, keep)

    def reset(self) -> None:
        """End all requests without learning from them."""
        self._seen.clear()
        self._hosted.abandon()


def mask_of(parent: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return visibility (b, n, n) from the parents (b, n) of b trees: set if column j is node i or an ancestor."""
    rows, width = parent.shape
    mask = np.zeros((rows, width, width), np.bool_)
    mask[:, 0, 0] = True
    every = np.arange(rows)
    for i in range(1, width):
        mask[:, i] = mask[every, parent[:, i]]
        mask[:, i, i] = True
    return mask


def _fill(token_ids: NDArray[np.int32], parent: NDArray[np.int32], tree: DraftTree) -> None:
    """Write a tree after the token at the beginning of the two (width,) rows, and pad them with a path.

    The path goes on after the first leaf and says that its token comes again and again: a guess that costs nothing.
    """
    drafted = 1 + len(tree)
    token_ids[1:drafted] = tree.token_ids
    parent[1:drafted] = tree.parent + 1
    turns = np.flatnonzero(parent[1:drafted] != np.arange(drafted - 1))
    leaf = int(turns[0]) if len(turns) else drafted - 1
    token_ids[drafted:] = token_ids[leaf]
    parent[drafted:] = np.arange(drafted - 1, len(parent) - 1)
    parent[drafted : drafted + 1] = leaf


def _tokenizer_of(target: Any) -> Any:
    """The tokenizer of SGLang's target worker."""
    if target.tokenizer is None:
        raise ConfigError("the model's tokenizer", "--skip-tokenizer-init", "Leave that out.")
    return target.tokenizer
