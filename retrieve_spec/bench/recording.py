"""Recorded answers with the target's logits: what a model said, and its top tokens wherever a pass has looked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers.utils import logging

import retrieve_spec as rs
from retrieve_spec.bench.methods import FreshDrafter, sampling
from retrieve_spec.bench.workloads import Prompt, encode, read_prompts, subtask
from retrieve_spec.config import MAX_NODES, SpeculationConfig
from retrieve_spec.datastore.fingerprint import load_tokenizer, tokenizer_fingerprint
from retrieve_spec.drafting.drafter import Budget, Layer, VerifiedPass
from retrieve_spec.drafting.tree import ROOT, DraftTree
from retrieve_spec.errors import TokenizerMismatchError, TraceError, in_a_line, require
from retrieve_spec.model_layers import decoder_blocks
from retrieve_spec.reference_model import load_model
from retrieve_spec.sources.bigrams import Bigrams
from retrieve_spec.verify.interface import catch_hidden

Ids = NDArray[np.int32]
TOP = 16
"""Tokens that are kept of a context's logits."""
NOWHERE = -1
GREEDY = (0, 0, -1)
"""Noise of an answer that was not sampled."""


class Contexts:
    """Contexts that a model has read, each one token behind another, with the top tokens it gave there.

    Attributes
    ----------
    parent, token
        (n,) int32 the context without its last token (below 0 for what is looked at first), and that token.
    top_ids, top_logits
        (n, `TOP`) int32 and float32, most probable first; -inf where no pass has looked.
    """

    def __init__(self, parent: Ids, token: Ids, top_ids: Ids, top_logits: NDArray[np.float32]) -> None:
        self.parent, self.token, self.top_ids, self.top_logits = parent, token, top_ids, top_logits
        edges = zip(parent.tolist(), token.tolist(), strict=True)
        self._places = {edge: place for place, edge in enumerate(edges)}

    def behind(self, context: int, tokens: Sequence[int]) -> int:
        """The context that follows another one by some tokens, or `NOWHERE`."""
        for token in tokens:
            context = self._places.get((context, token), NOWHERE)
        return context

    def shown(self, root: int, tree: DraftTree, path: Ids, emitted: Ids) -> VerifiedPass:
        """What a pass behind a context showed of a draft; nodes where the model has never looked are left out."""
        places, numbers, kept = [root], [ROOT], list[int]()
        for node, (parent, token) in enumerate(zip(tree.parent.tolist(), tree.token_ids.tolist(), strict=True)):
            place = self._places.get((places[parent + 1], token), NOWHERE)
            known = place != NOWHERE and self.top_logits[place, 0] > -np.inf
            places.append(place if known else NOWHERE)
            numbers.append(len(kept) if known else NOWHERE)
            if known:
                kept.append(node)
        walked = np.array([numbers[node + 1] for node in path], np.int32)
        if NOWHERE in walked or self.top_logits[root, 0] == -np.inf:  # the end of an answer, which no pass has read
            return VerifiedPass(tree, path, emitted)
        part = tree.nodes(np.array(kept, np.int64))
        part.parent = np.array([numbers[parent + 1] for parent in part.parent], np.int32)
        rows = [root, *(places[node + 1] for node in kept)]
        return VerifiedPass(part, walked, emitted, self.top_ids[rows], self.top_logits[rows])


@dataclass(frozen=True, slots=True)
class Shown:
    """What a model showed on the way to an answer.

    Attributes
    ----------
    contexts, end
        What the model has read, and the context that the prompt ends with.
    noise
        (3,) int64 seed, row and position of the first token where tokens were sampled; a position below 0 where not.
    states
        (t, d) float16 hidden states that the answer's t tokens were chosen from, where they were recorded.
    """

    contexts: Contexts
    end: int
    noise: NDArray[np.int64]
    states: NDArray[np.float16] | None = None

    def of_prompt(self) -> tuple[Ids, Ids, NDArray[np.float32]]:
        """The prompt's last tokens that a pass has looked at, and the top tokens behind each."""
        places, at = list[int](), self.end
        while at >= 0:
            places.append(at)
            at = int(self.contexts.parent[at])
        seen = places[::-1]
        return self.contexts.token[seen], self.contexts.top_ids[seen], self.contexts.top_logits[seen]

    def noise_at(self, at: int) -> tuple[int, int, int] | None:
        """Noise that the answer's token number `at` was drawn with."""
        seed, row, position = self.noise.tolist()
        return (seed, row, position + at) if position >= 0 else None

    def state_at(self, at: int) -> NDArray[np.float32] | None:
        """(d,) hidden state that the answer's token number `at` was chosen from."""
        return None if self.states is None or at >= len(self.states) else self.states[at].astype(np.float32)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded conversation: the prompt, then segments in order; only generated ones are drafted.

    Rows of one group share text (a repository, a question asked again) and are kept on one side of a split. `shown`:
    what the model showed on the way, where that was recorded; such a row has one segment, the answer.
    """

    task: str
    prompt: Ids
    segments: list[tuple[Ids, bool]]
    group: str = ""
    shown: Shown | None = None


class LogitTrace:
    """Recorded answers, and all contexts that the model has read on the way.

    Attributes
    ----------
    fingerprint
        Of the tokenizer.
    rows
        What was recorded, a row for each turn.
    contexts
        Those of all rows.
    bigrams
        Of the model, those of tokens that occur.
    layer
        Whose hidden states are kept, None where none are.
    """

    def __init__(
        self, fingerprint: str, rows: list[TraceRow], contexts: Contexts, bigrams: Bigrams, layer: Layer | None = None
    ) -> None:
        self.fingerprint, self.rows, self.contexts, self.bigrams = fingerprint, rows, contexts, bigrams
        self.layer = layer

    def save(self, path: str | Path) -> None:
        """Write one compressed file of NumPy arrays (.npz), logits as float16."""
        contexts = self.contexts
        found = [(row, row.segments[0][0], row.shown) for row in self.rows if row.shown is not None]
        states = [shown.states for _, _, shown in found if shown.states is not None]
        kept: dict[str, Any] = {"states": np.concatenate(states), "layer": self.layer} if states else {}
        np.savez_compressed(
            path,
            fingerprint=np.array(self.fingerprint),
            names=np.array([(row.task, row.group) for row, _, _ in found]),
            lengths=np.array([(len(row.prompt), len(output), shown.end) for row, output, shown in found], np.int64),
            tokens=np.concatenate([part for row, output, _ in found for part in (row.prompt, output)]),
            noise=np.array([shown.noise for _, _, shown in found], np.int64),
            parent=contexts.parent,
            token=contexts.token,
            top_ids=contexts.top_ids,
            top_logits=contexts.top_logits.astype(np.float16),
            bigrams=self.bigrams.entries,
            **kept,
        )

    @classmethod
    def load(cls, path: str | Path, tokenizer: Any) -> LogitTrace:
        """Read what `save` wrote.

        Raises
        ------
        TraceError
            The file is another one, cut off or damaged.
        TokenizerMismatchError
            The answers are those of a model with another tokenizer than `tokenizer`.
        """
        try:
            with np.load(path, allow_pickle=False) as found:
                data = {name: found[name] for name in found.files}
            top = data["top_logits"].astype(np.float32)
            contexts = Contexts(data["parent"], data["token"], data["top_ids"], top)
            parts = np.split(data["tokens"], np.cumsum(data["lengths"][:, :2]))
            ends, states = np.cumsum(data["lengths"][:, 1])[:-1], data.get("states")
            by_row = [None] * len(data["names"]) if states is None else np.split(states, ends)
            named = zip(
                data["names"].tolist(), parts[::2], parts[1::2], data["lengths"], data["noise"], by_row, strict=False
            )
            rows = [
                TraceRow(task, prompt, [(output, True)], group, Shown(contexts, int(end), noise, own))
                for (task, group), prompt, output, (_, _, end), noise, own in named
            ]
            layer = data["layer"].item() if "layer" in data else None
            trace = cls(str(data["fingerprint"]), rows, contexts, Bigrams(data["bigrams"]), layer)
        except Exception as error:  # whatever readers of a damaged file say
            remedy = "Record it again with `retrieve-spec bench record`."
            raise TraceError(f"recorded answers with logits in {path}", in_a_line(error), remedy) from error
        mine = tokenizer_fingerprint(tokenizer)
        if trace.fingerprint != mine:
            expected = f"the tokenizer of the answers in {path} ({trace.fingerprint[7:19]})"
            raise TokenizerMismatchError(expected, mine[7:19], "Name that of their model.")
        return trace


class Notes:
    """Contexts as they are read, and their top tokens as they are first seen."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], int] = {}
        self._tops: dict[int, tuple[Ids, NDArray[np.float32]]] = {}

    def behind(self, context: int, token: int) -> int:
        """The context that follows another one by a token."""
        return self._places.setdefault((context, token), len(self._places))

    def see(self, context: int, top_ids: Ids, top_logits: NDArray[np.float32]) -> None:
        """Note the top tokens (`TOP`,) behind a context."""
        self._tops.setdefault(context, (top_ids.copy(), top_logits.copy()))

    def contexts(self) -> Contexts:
        """All that was noted."""
        ids = np.zeros((len(self._places), TOP), np.int32)
        logits = np.full(ids.shape, -np.inf, np.float32)
        for place, top in self._tops.items():
            ids[place], logits[place] = top
        parent, token = np.array(list(self._places), np.int32).reshape(-1, 2).T
        return Contexts(parent, token, ids, logits)


class Recorder(FreshDrafter):
    """`auto`, taking down what each pass showed of the model.

    Parameters
    ----------
    notes
        What it is written into.
    tokenizer
        Of the model.

    Attributes
    ----------
    end, noise
        Of the last answer, as `Shown` has them.
    """

    top_k = TOP

    def __init__(self, notes: Notes, tokenizer: Any) -> None:
        super().__init__(SpeculationConfig(), tokenizer=tokenizer)
        self._notes, self._answers = notes, 0
        self.end, self.noise = NOWHERE, GREEDY

    def start(self, prompt_ids: Ids, prediction_ids: Ids | None = None) -> None:
        """Begin an answer."""
        self._answers += 1
        self.noise, self._emitted = GREEDY, 0
        self.drafter.start(prompt_ids, prediction_ids)

    def observe_prompt(self, token_ids: Ids, top_ids: Ids, top_logits: NDArray[np.float32]) -> None:
        """Take down the contexts of the prompt."""
        at = NOWHERE - self._answers  # the same text begins differently behind another prompt
        for token, *top in zip(token_ids.tolist(), top_ids, top_logits, strict=True):
            at = self._notes.behind(at, token)
            self._notes.see(at, *top)
        self._at = self.end = at
        self.drafter.observe_prompt(token_ids, top_ids, top_logits)

    def propose(self, budget: Budget) -> DraftTree:
        """Draft, noting the noise that tokens are sampled with."""
        if budget.noise is not None and self.noise == GREEDY:
            seed, row, position = budget.noise
            self.noise = seed, row, position - self._emitted
        tree: DraftTree = self.drafter.propose(budget)
        return tree

    def observe(self, verified: VerifiedPass) -> None:
        """Take down the contexts of the text and of drafts."""
        if verified.top_ids is not None and verified.top_logits is not None:
            tree, places = verified.tree, [self._at]
            for parent, token in zip(tree.parent.tolist(), tree.token_ids.tolist(), strict=True):
                places.append(self._notes.behind(places[parent + 1], token))
            for place, *top in zip(places, verified.top_ids, verified.top_logits, strict=True):
                self._notes.see(place, *top)
        for token in verified.emitted.tolist():
            self._at = self._notes.behind(self._at, token)
        self._emitted += len(verified.emitted)
        self.drafter.observe(verified)


def record(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    nodes: Sequence[int] = (60, MAX_NODES),
    max_new_tokens: int = 160,
    seed: int = 0,
    layer: Layer | None = None,
    progress: Callable[[], object] = lambda: None,
    **options: Any,
) -> LogitTrace:
    """Let a model answer prompts, later turns behind its own answers, and keep its top tokens of all that passes read.

    Parameters
    ----------
    model, tokenizer
        As `from_pretrained` gave them; the model is accelerated here.
    prompts
        What to answer (`retrieve_spec.bench.workloads.read_prompts`).
    nodes
        Nodes per pass; all prompts are answered once with each. A replay knows the wrong turns that were drafted here,
        so it is like the model with as many nodes, and nearly so with others.
    max_new_tokens
        Per turn.
    seed
        For torch before every answer.
    layer
        Keep its hidden states, too, as float16 (`"last"`: what goes into the output embeddings).
    progress
        Called after each prompt.
    options
        Further arguments of `generate`.

    Returns
    -------
    LogitTrace
        One row for every turn.
    """
    blocks = () if layer in (None, "last") else decoder_blocks(model)
    named = isinstance(layer, int) and 0 < layer <= len(blocks)
    require(layer in (None, "last") or named, f"'last', or a layer from 1 to {len(blocks)}", layer, "Give 'last'.")
    notes = Notes()
    for number in nodes:
        recorder = Recorder(notes, tokenizer)
        rs.accelerate(model, tokenizer, drafter=recorder, nodes=number)
        answered = []
        for prompt in prompts:
            said = list[str]()
            for _ in prompt.turns:
                ids = encode(tokenizer, prompt, said).to(model.device)
                torch.manual_seed(seed)
                text = model.generate(ids, max_new_tokens=max_new_tokens, **options)[0].cpu().numpy().astype(np.int32)
                parts = text[: ids.shape[1]], text[ids.shape[1] :]
                answered.append((subtask(prompt.task), prompt.name, *parts, recorder.end, recorder.noise))
                said.append(tokenizer.decode(parts[1], skip_special_tokens=True).strip())
            progress()
    contexts = notes.contexts()
    rows = []
    for task, group, ids, output, end, noise in answered:
        states = None if layer is None else _states(model, layer, ids, output)
        shown = Shown(contexts, end, np.array(noise, np.int64), states)
        rows.append(TraceRow(task, ids, [(output, True)], group, shown))
    bigrams = Bigrams(_of_tokens(recorder.bigrams, contexts.token))
    return LogitTrace(tokenizer_fingerprint(load_tokenizer(tokenizer)), rows, contexts, bigrams, layer)


@torch.no_grad()
def _states(model: Any, layer: Layer, prompt: Ids, output: Ids) -> NDArray[np.float16]:
    """(t, d) hidden states that an answer's tokens were chosen from."""
    ids = torch.from_numpy(np.concatenate([prompt, output]).astype(np.int64))
    with catch_hidden(model, layer) as caught:
        model(ids[None].to(model.device))
    found: NDArray[np.float16] = caught[0][0, len(prompt) - 1 : -1].half().cpu().numpy()
    return found


def _of_tokens(bigrams: Bigrams | None, tokens: Ids) -> Ids:
    """The entries of bigrams with those of some tokens alone."""
    if bigrams is None:
        return np.empty((0, 2), np.int32)
    entries, seen = np.full_like(bigrams.entries, -1), np.unique(tokens)
    entries[seen] = bigrams.entries[seen]
    return entries


def record_prompts(
    out: Path,
    *,
    model: str,
    prompts: str,
    nodes: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    limit: int | None,
    tasks: str | None,
    dtype: str,
    quantize: str | None,
    device: str,
    hidden: Layer | None,
    quiet: bool,
) -> int:
    """Record what the options of `bench record` say into the file `out`; returns how many answers there are."""
    logging.disable_progress_bar()
    questions = read_prompts(prompts, limit, tasks.split(",") if tasks else None)
    lm, tokenizer = load_model(model, dtype=dtype, quantize=quantize, device=device)
    with tqdm(total=len(questions) * len(nodes), unit="prompt", disable=quiet or None) as bar:
        found = record(
            lm, tokenizer, questions, nodes=nodes, max_new_tokens=max_new_tokens, seed=seed, layer=hidden,
            progress=bar.update, **sampling(temperature, top_p),
        )  # fmt: skip
    found.save(out)
    return len(found.rows)
