"""Peers' drafting code as drafters that `retrieve_spec.bench.replay` can replay."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sources import Skipped, arctic_folder, vllm_ngram_file
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.published.base import PublishedDrafter
from retrieve_spec.drafting.tree import DraftTree

Ids = NDArray[np.int32]
KEPT, GIVEN, PHRASES = ", answers kept", ", other answers given", ", phrases learned"
"""Endings of names: what a drafter knows beside the text so far."""
LOOKUP_TOKENS = 10  # candidates of every prompt lookup, transformers' default
SCRIPT = 7  # index in SOURCE_NAMES that is credited


class Peer(PublishedDrafter):
    """A drafter of chains over the text so far."""

    def propose(self, budget: Budget) -> DraftTree:
        """Draft a chain."""
        return chain(self.lookup(min(LOOKUP_TOKENS, budget.max_nodes, budget.max_depth)))

    def lookup(self, most: int) -> Ids:
        """(<= most,) the tokens that the peer expects."""
        raise NotImplementedError


class TransformersLookup(Peer):
    """`PromptLookupCandidateGenerator` of transformers, as `prompt_lookup_num_tokens=10` runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = PromptLookupCandidateGenerator(num_output_tokens=LOOKUP_TOKENS, max_length=2**31)

    def lookup(self, most: int) -> Ids:
        """Its candidates."""
        ids = torch.frombuffer(self.text, dtype=torch.int32)[None]
        return self.generator.get_candidates(ids)[0][0, len(self.text) :].numpy()[:most]


class VllmNgram(Peer):
    """The n-gram proposer of vLLM: the longest match of `shortest` to `longest` tokens."""

    def __init__(self, shortest: int, longest: int) -> None:
        super().__init__()
        self.shortest, self.longest = shortest, longest
        # It imports two classes for annotations only, and stand-ins spare its dependencies.
        for place, attribute in (("vllm.config", "VllmConfig"), ("vllm.v1.worker.gpu_input_batch", "InputBatch")):
            parts = place.split(".")
            for end in range(1, len(parts) + 1):
                sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
            setattr(sys.modules[place], attribute, object)
        spec = importlib.util.spec_from_file_location("peer_vllm_ngram", vllm_ngram_file())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.find = module._find_longest_matched_ngram_and_propose_tokens

    def lookup(self, most: int) -> Ids:
        """Its candidates."""
        return self.find(np.frombuffer(self.text, np.int32), self.shortest, self.longest, 2**31, most)


class ArcticSuffix(Peer):
    """Suffix trees of Arctic Inference (SuffixDecoding) with the settings of its own vLLM plug-in.

    Parameters
    ----------
    tree
        Draft a tree; its plug-in drafts chains.
    keep
        Keep the responses of earlier requests in the global tree.
    factor, least
        Draft at most `factor` tokens per matched token, none of path probability below `least`.
    answers
        (tokens,) each, responses that the global tree begins with.
    """

    depth = 64

    def __init__(
        self, tree: bool, keep: bool, factor: float = 1.0, least: float = 0.1, answers: Sequence[Ids] = ()
    ) -> None:
        super().__init__()
        if (folder := str(arctic_folder())) not in sys.path:
            sys.path.insert(0, folder)
        from arctic_inference.suffix_decoding._C import SuffixTree

        self.make, self.tree, self.keep, self.factor, self.least = SuffixTree, tree, keep, factor, least
        self.shared, self.requests = SuffixTree(self.depth), len(answers)
        self.trees_of_all = [self.shared] if keep or answers else []
        for number, answer in enumerate(answers):
            self.shared.extend_ndarray(number, np.ascontiguousarray(answer, np.int32))

    def start(self, prompt_ids: Ids, prediction_ids: Ids | None = None) -> None:
        """Begin a request with a tree of its own."""
        self.local = self.make(self.depth)
        self.requests += 1
        super().start(prompt_ids)

    def feed(self, token_ids: Ids) -> None:
        """Append text to the request's tree."""
        super().feed(token_ids)
        self.local.extend_ndarray(0, np.ascontiguousarray(token_ids, np.int32))

    def observe(self, verified: VerifiedPass) -> None:
        """Responses also go to the tree of all requests."""
        super().observe(verified)
        if self.keep:
            self.shared.extend_ndarray(self.requests, np.ascontiguousarray(verified.emitted, np.int32))

    def propose(self, budget: Budget) -> DraftTree:
        """The better of both trees' drafts, by its score."""
        context = np.frombuffer(self.text[-self.depth :], np.int32)
        most = min(budget.max_nodes, budget.max_depth) if not self.tree else budget.max_nodes
        drafts = [
            tree.speculate_ndarray(context, most, self.factor, 0.0, self.least, self.tree)
            for tree in [self.local, *self.trees_of_all]
        ]
        best = max(drafts, key=lambda draft: draft.score)
        return as_tree(np.array(best.token_ids, np.int32), np.array(best.parents, np.int32), best.probs)


def ours(preset: str, session: bool = False, datastores: Sequence[Any] = (), phrases: bool = False) -> Any:
    """A preset of this library; only `auto` also drafts without the logits that a replay does not have.

    `phrases`: learn from one row to the next what several have in common, as `auto` does unless it is told not to.
    """
    from retrieve_spec.config import SpeculationConfig
    from retrieve_spec.drafting.presets import build_drafter

    drafter = build_drafter(
        SpeculationConfig(draft=preset, session=session, phrases="auto" if phrases else "off"), datastores=datastores
    )
    if drafter.top_k > 0 and preset != "auto":
        raise Skipped("it learns from the model's logits, which a replay does not have")
    return drafter


def chain(token_ids: Ids) -> DraftTree:
    """A chain of tokens as a tree."""
    return as_tree(np.array(token_ids, np.int32), np.arange(-1, len(token_ids) - 1, dtype=np.int32), None)


def as_tree(token_ids: Ids, parent: Ids, path_probability: Any) -> DraftTree:
    """Parallel arrays as a tree; parents come first."""
    n = len(token_ids)
    depth = np.ones(n, np.int32)
    for i in range(n):
        if parent[i] >= 0:
            depth[i] = depth[parent[i]] + 1
    log_p = np.zeros(n, np.float32) if path_probability is None else np.log(np.maximum(path_probability, 1e-6))
    credit = np.full(n, SCRIPT, np.uint8)
    return DraftTree(token_ids, parent, depth, log_p.astype(np.float32), credit, np.full(n, -1, np.int64))


PEERS: dict[str, Callable[[], Any]] = {
    "transformers prompt lookup": TransformersLookup,
    "vllm ngram (2-5)": lambda: VllmNgram(2, 5),
    "suffix-decoding chain": lambda: ArcticSuffix(tree=False, keep=False),
    "suffix-decoding tree": lambda: ArcticSuffix(tree=True, keep=False),
    "suffix-decoding tree, wide": lambda: ArcticSuffix(tree=True, keep=False, factor=4.0, least=0.0),
    f"suffix-decoding tree{KEPT}": lambda: ArcticSuffix(tree=True, keep=True),
    f"suffix-decoding tree, wide{KEPT}": lambda: ArcticSuffix(tree=True, keep=True, factor=4.0, least=0.0),
}
"""Factories of the peers by name."""
