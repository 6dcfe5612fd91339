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
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES, SpeculationConfig
from retrieve_spec.errors import ConfigError
from retrieve_spec.integrations.options import Options, check_version
from retrieve_spec.integrations.tree_corpus import TreeCorpus, mask_of

TESTED = ("0.5.23",)
"""Versions of SGLang whose classes the tests know."""
NAME = "RETRIEVE_SPEC"
"""What `--speculative-algorithm` calls it."""
PLACE = "RETRIEVE_SPEC_SGLANG"
"""Environment variable of the options, an object in JSON; SGLang's own arguments have no room for them."""
_OWN = frozenset({"from_string", "register", "create_worker", "handle_server_args"})
"""What the built-in algorithm is not asked for."""
_DEVICES = ("cuda", "cpu", "xpu")
_REMEDY = f"""Install one of these, or set {PLACE}='{{"any_version": true}}'."""
_SPARE = 64
"""Nodes of the n-gram trie that SGLang's worker makes and that nobody asks here; its default takes a gigabyte."""


def register() -> None:
    """Make the algorithm known to this process; SGLang calls it as a plug-in."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    make_known = SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, validate_server_args=validate, spec_class=algorithm_class()
    )
    make_known(worker_class)


def options() -> Options:
    """The user's options.

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
    """Refuse what cannot be served, before a model is loaded.

    Raises
    ------
    ConfigError
        This version of SGLang was never tested, an option is wrong, or arguments of the server cannot go together.
    """
    if not options().any_version:
        check_version("SGLang", ("sglang",), TESTED, _REMEDY)
    if server_args.speculative_ngram_external_corpus_path is not None:
        got = "--speculative-ngram-external-corpus-path"
        raise ConfigError("stores to draft from", got, f"Build a store, and name it as datastores in {PLACE}.")
    if server_args.device not in _DEVICES:
        raise ConfigError(f"--device {', '.join(_DEVICES)}", repr(server_args.device), "Serve without drafts there.")
    width = server_args.speculative_num_draft_tokens
    if width is not None and not 2 <= width <= MAX_NODES + 1:
        raise ConfigError(f"--speculative-num-draft-tokens 2 … {MAX_NODES + 1}", repr(width), "12 is the default.")
    if server_args.pp_size > 1:
        raise ConfigError("--pp-size 1", repr(server_args.pp_size), "Use tensor or data parallelism.")


def handle_server_args(algorithm: Any, server_args: Any) -> None:
    """Set what SGLang sets for its own n-grams; the defaults are the same."""
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
    """The class that SGLang asks about the algorithm: whatever it asks is what it would be told of `NGRAM`."""
    from sglang.srt.speculative.spec_info import CustomSpecAlgo, SpeculativeAlgorithm

    questions = [
        name
        for name, value in vars(SpeculativeAlgorithm).items()
        if isinstance(value, types.FunctionType) and not name.startswith("_") and name not in _OWN
    ]
    answers = {name: _as(SpeculativeAlgorithm.NGRAM, name) for name in questions}
    return type("RetrieveSpecAlgorithm", (CustomSpecAlgo,), {**answers, "handle_server_args": handle_server_args})


def _as(other: Any, name: str) -> Callable[..., Any]:
    """A method that answers what another object's does."""

    def answer(algorithm: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(other, name)(*args, **kwargs)

    answer.__name__ = name
    return answer


def worker_class(server_args: Any) -> type:
    """SGLang's n-gram worker with drafts of this library.

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
    """What a worker does otherwise than SGLang's `NGRAMWorker`, which stands behind it: it drafts from whole texts.

    The first rank of a group drafts and tells the others, so that all verify the same.
    """

    enable_overlap: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        self._group = parallel.tp_group
        worker: Any = self
        self._width = int(worker.draft_token_num)
        self.ngram_corpus = Corpus(self._trees(worker, parallel.dp_rank) if self._group.rank_in_group == 0 else None)

    def _trees(self, worker: Any, replica: int | None) -> TreeCorpus:
        target = worker.target_worker

        def tokenizer() -> Any:
            if target.tokenizer is None:
                raise ConfigError("the model's tokenizer", "--skip-tokenizer-init", "Leave that out.")
            return target.tokenizer

        drafter = options().drafter(tokenizer, int(worker.model_runner.model_config.vocab_size), replica)
        return TreeCorpus(drafter, self._width, "tree" if worker.topk > 1 else "chain", tokenizer)

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """One step, as SGLang's; while prompts are read, their requests begin."""
        reading = list(batch.reqs) if batch.forward_mode.is_extend() else []
        result = super().forward_batch_generation(batch, *args, **kwargs)  # type: ignore[misc]
        self.ngram_corpus.begin(reading)
        return result

    def _prepare_draft_tokens(self, batch: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Token ids (b · K,) and who looks at whom (b · K · K,), as the n-gram worker has them."""
        drafted = np.empty((2, len(batch.reqs), self._width), np.int32)
        if (trees := self.ngram_corpus.trees) is not None:
            drafted[:] = trees.trees(batch.reqs, self._accepted_last(batch))
        if self._group.world_size > 1:
            _tell(self._group, drafted)
        token_ids, parent = drafted
        return token_ids.astype(np.int64).ravel(), mask_of(parent).astype(np.int64).ravel()

    def _accepted_last(self, batch: Any) -> list[list[int]]:
        """Tokens of each request that were accepted in the step before and are not in its answer yet.

        So it is where SGLang looks at a step's result while the next one runs.
        """
        if not self.enable_overlap or batch.grammar_needs_sync():
            return [[]] * len(batch.reqs)
        ids = batch.spec_info.accept_tokens.reshape(-1, self._width).tolist()
        lengths = batch.spec_info.accept_lens.tolist()
        return [tokens[:length] for tokens, length in zip(ids, lengths, strict=True)]

    def _update_ngram_corpus(self, batch: Any) -> None:
        """While the model runs: forget who has ended. What was accepted is learned with the next draft."""
        self.ngram_corpus.end_those_gone()


class Corpus:
    """What stands where SGLang's worker has its corpus of n-grams.

    Parameters
    ----------
    trees
        What drafts, None where another rank does.
    """

    def __init__(self, trees: TreeCorpus | None) -> None:
        self.trees = trees

    def begin(self, requests: list[Any]) -> None:
        """Begin requests."""
        if self.trees is not None and requests:
            self.trees.begin(requests)

    def end_those_gone(self) -> None:
        """Forget requests that have ended."""
        if self.trees is not None:
            self.trees.end_those_gone()

    def erase_match_state(self, req_ids: list[str]) -> None:
        """Nothing: that requests left the batch does not say yet how they ended, `end_those_gone` sees it."""

    def reset(self) -> None:
        """Forget all requests."""
        if self.trees is not None:
            self.trees.reset()


def _tell(group: Any, drafted: NDArray[np.int32]) -> None:
    """Give all ranks of a group the first one's drafts, in place."""
    import torch

    torch.distributed.broadcast(torch.from_numpy(drafted), src=group.first_rank, group=group.cpu_group)
