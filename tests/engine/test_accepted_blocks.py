"""Blocks of accepted tokens: whatever ends, counts, slides or is taken back inside of one is as in plain decoding."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from batch_rows import CHAINS, small_model
from scripted_drafter import ScriptedDrafter
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import retrieve_spec as rs
from retrieve_spec.drafting.drafter import Budget
from retrieve_spec.drafting.tree import DraftTree

MOST = 12
"""Tokens of a block that are accepted, at most."""
BLOCKS = range(MOST + 1)
VOCAB = 199
LENGTH = 11
NAMES = [chr(ord("a") + i - 3) if 3 <= i < 29 else f"<{i:03d}>" for i in range(VOCAB)]
"""Texts of the tokens, some of which are longer than others."""


class BlockDrafter(ScriptedDrafter):
    """Trees of which just so many tokens are right as `lengths` say in turn; None: no draft.

    A wrong branch as deep stands before the right one, and wrong tokens behind it.
    """

    beside = True
    """Whether there is a wrong branch; chains have none."""

    def take(self, answer: Any, lengths: Sequence[int | None]) -> None:
        """Begin anew with another answer and other lengths."""
        self.turn_to(answer, "blocks")
        self.lengths = lengths

    def propose(self, budget: Budget) -> DraftTree:
        self.budgets.append(budget)
        length, at = self.lengths[len(self.seen) % len(self.lengths)], len(self.text)
        if length is None:
            return DraftTree()
        right = self.answer[at : at + length]
        wrong = [(token + 1) % self.vocab for token in self.answer[at + len(right) : at + len(right) + 3]]
        path = (right + wrong)[: budget.max_depth]
        others = [[(token + 5) % self.vocab for token in path]] if self.beside else []
        tree = DraftTree.from_paths([branch for branch in (*others, path) if branch])
        return tree.first(budget.max_nodes)


def prompt_of(length: int = LENGTH) -> torch.Tensor:
    return torch.tensor([[30 + (i * 37 + 11) % 160 for i in range(length)]])


def pair(model_type: str = "llama", recorded_pass: str = "always", **settings: Any) -> tuple[Any, Any, BlockDrafter]:
    """A model as it is, and one that drafts blocks."""
    plain = small_model(model_type, **settings)
    drafter = BlockDrafter([], "blocks", vocab=VOCAB)
    ours = rs.accelerate(copy.deepcopy(plain), drafter=drafter, nodes=40, recorded_pass=recorded_pass)
    drafter.beside = ours.speculation.mode == "tree"
    return plain, ours, drafter


def greedy(model: Any, ids: torch.Tensor, tokens: int = 40, **options: Any) -> torch.Tensor:
    return model.generate(ids, **{"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0} | options)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Tokens of several letters, a stop string may begin and end inside of them."""
    model = models.BPE(vocab={name: i for i, name in enumerate(NAMES)}, merges=[], unk_token=NAMES[0])
    whole = Tokenizer(model)
    whole.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=whole)


def first_stop(text: list[int], stop: str) -> int:
    """Index of the first new token in which a stop string ends; as many as there are where none does."""
    said = ""
    for index, token in enumerate(text):
        before, said = len(said), said + NAMES[token]
        if index >= LENGTH and said.find(stop, max(before - len(stop) + 1, 0)) >= 0:
            return index - LENGTH
    return len(text) - LENGTH


def ends(text: list[int], cut: int, tokenizer: Any) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Calls that end at or near new token `cut`, and how many new tokens they have."""
    new = text[LENGTH:]
    eos = {"eos_token_id": new[cut]}
    at_eos = new.index(new[cut]) + 1
    before, here = NAMES[text[LENGTH + cut - 1]], NAMES[new[cut]]
    stop = (before[1:] or before) + (here[:-1] or here)
    string = {"stop_strings": [stop], "tokenizer": tokenizer}
    at_stop = first_stop(text, stop) + 1

    def long_enough(input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] > LENGTH + cut])

    criterion = {"stopping_criteria": [long_enough]}
    yield "cap", {"max_new_tokens": cut + 1}, cut + 1
    yield "end of text", eos, at_eos
    yield "string", string, at_stop
    yield "criterion", criterion, cut + 1
    yield "end of text before a cap", eos | {"max_new_tokens": cut + 2}, min(at_eos, cut + 2)
    yield "cap before an end of text", eos | {"max_new_tokens": cut}, min(at_eos, cut)
    later = {"eos_token_id": new[cut + 1]}
    yield "string before an end of text", string | later, min(at_stop, new.index(new[cut + 1]) + 1)
    yield "criterion and end of text at once", criterion | eos, min(at_eos, cut + 1)


@pytest.mark.parametrize(
    ("recorded_pass", "blocks"), [("always", (0, 1, 2, 3, 4, 7, 8, MOST)), ("off", (0, 1, 7, MOST))]
)
def test_a_text_ends_inside_a_block_where_it_ends(tokenizer: Any, recorded_pass: str, blocks: Sequence[int]) -> None:
    """At every cut of a block, by one rule or by two in the same block."""
    plain, ours, drafter = pair(recorded_pass=recorded_pass)
    ids = prompt_of()
    text = greedy(plain, ids)[0].tolist()
    for length in blocks:
        drafter.take(text, [length])
        assert greedy(ours, ids)[0].tolist() == text
        assert {len(verified.path) for verified in drafter.seen[1:-1]} == {length}
        for cut in range(1, length + 2):
            for name, options, new in ends(text, cut, tokenizer):
                drafter.take(text, [length])
                said = greedy(ours, ids, **options, return_dict_in_generate=True)
                assert said.sequences[0].tolist() == text[: LENGTH + new], (name, length, cut)
                assert said.past_key_values.get_seq_length() == LENGTH + new - 1, (name, length, cut)
                assert drafter.text == text[: LENGTH + new], (name, length, cut)
    for name, options, _ in ends(text, 5, tokenizer):
        assert torch.equal(greedy(ours, ids, **options), greedy(plain, ids, **options)), name


WINDOWS: list[tuple[str, dict[str, Any]]] = [
    ("gemma3_text", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    ("mistral", {"sliding_window": 8}),
    ("gpt_neo", CHAINS),
]


@pytest.mark.parametrize(("model_type", "settings"), WINDOWS, ids=[name for name, _ in WINDOWS])
@pytest.mark.parametrize("recorded_pass", ["always", "off"])
def test_a_refused_branch_across_the_edge_of_a_window(
    model_type: str, settings: dict[str, Any], recorded_pass: str
) -> None:
    """Blocks and wrong branches beside them begin at every place before and behind the edge."""
    plain, ours, drafter = pair(model_type, recorded_pass, **settings)
    for size in (1, 3, 6, 7, 8, 9, 13):
        ids = prompt_of(size)
        wanted = greedy(plain, ids)
        for first in (0, 2, 5, 9, MOST):
            drafter.take(wanted[0], [*BLOCKS[first:], *BLOCKS[:first]])
            assert torch.equal(greedy(ours, ids), wanted), (size, first)


@pytest.mark.parametrize("recorded_pass", ["always", "off"])
def test_blocks_end_at_the_last_position(recorded_pass: str) -> None:
    settings = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "max_position_embeddings": 32}
    plain, ours, drafter = pair("gpt2", recorded_pass, **settings)
    ids = prompt_of()
    wanted = greedy(plain, ids, 32 - LENGTH)
    for length in BLOCKS:
        drafter.take([*wanted[0].tolist(), *range(3, 30)], [length])
        assert torch.equal(greedy(ours, ids, 32 - LENGTH), wanted), length
