"""Chats of models whose caches cannot be cut, for windows or recurrent layers, read what is new and no more."""

import copy

import pytest
import torch
import transformers
from scripted import ScriptedBackend
from templates import FAMILIES
from waiting import wait_for

from retrieve_spec.config import ServeConfig
from retrieve_spec.server.run import assemble

INSTRUCTIONS = {"role": "system", "content": "You are brief. " * 40}


class Forgetful(ScriptedBackend):
    """A model of layers that forget what a cut of their cache would need."""

    cuts_caches = False

    def crop(self, cache, keep):
        assert keep <= len(cache)
        return keep == len(cache)


@pytest.fixture
def server(live, codec, tokenizer):
    own = copy.deepcopy(tokenizer)
    own.chat_template = FAMILIES["qwen3"]
    return live(Forgetful(lambda prompt: [*codec.encode("<think>Hm.</think>Yes."), 0]), own)


def turns(server, count, *, said=None, **fields):
    """The tokens read and cached in each turn of a chat, and what it had said."""
    messages, read = [INSTRUCTIONS, {"role": "user", "content": "First. " * 20}], []
    for number in range(count):
        body = {"messages": messages, "max_tokens": 20, "temperature": 0, **fields}
        answer = server.post("/v1/chat/completions", body).json()
        message = answer["choices"][0]["message"]
        read.append((answer["timings"]["prompt_n"], answer["timings"]["cache_n"], message["content"]))
        messages = [*messages, {"role": "assistant", "content": said or message["content"]}]
        messages.append({"role": "user", "content": f"Number {number}?"})
    return read


def test_a_turn_whose_thought_is_left_out_reads_the_answer_and_the_question(server):
    first, *others = turns(server, 4)
    assert first[0] > 150 and all(0 < read < 40 and cached > 150 for read, cached, _ in others)
    assert {said for *_, said in [first, *others]} == {"Yes."}


def test_every_branch_of_a_chat_goes_on_from_where_it_began(server):
    turns(server, 1)
    for said in ("No.", "Maybe.", "Yes."):
        assert turns(server, 2, said=said)[1][0] < 40
    again = turns(server, 1)[0]
    assert again[0] < 10


def test_a_prompt_that_parts_from_another_goes_on_from_a_place_before_that(server):
    """As that of another chat of the same agent: their instructions are the same, and a line behind them is not."""

    def first_turn(line):
        said = [INSTRUCTIONS, {"role": "user", "content": f"{'Rule. ' * 900}{line} {'More. ' * 60}"}]
        spent = server.post("/v1/chat/completions", {"messages": said, "max_tokens": 5}).json()["timings"]
        return spent["prompt_n"], spent["cache_n"]

    size, cached = first_turn("One.")
    assert size > 2048 and cached == 0
    for line in ("Two.", "Three."):
        assert first_turn(line)[1] == 2048
    assert first_turn("Two.")[0] < 10


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "llama3"])
def test_a_new_chat_under_the_same_instructions_reads_its_question(server, family):
    server.service.tokenizer.chat_template = FAMILIES[family]
    look = {"type": "function", "function": {"name": "look", "description": "Look. " * 300}}
    said, read = [{"role": "system", "content": "Rule. " * 900}], []
    for question in ("What is it?", "Who are you?", "\n\nWhere?"):
        asked = {"messages": [*said, {"role": "user", "content": question}], "tools": [look], "max_tokens": 5}
        spent = server.post("/v1/chat/completions", asked).json()["timings"]
        read.append((spent["prompt_n"], spent["cache_n"]))
    assert read[0][0] > 2000 and all(new < 40 and cached > 2000 for new, cached in read[1:]), read


def test_nothing_is_kept_of_who_asks_for_no_cache_or_has_had_it_forgotten(server):
    assert all(cached == 0 for _, cached, _ in turns(server, 2, cache_prompt=False))
    server.client.delete("/v1/workspace")
    assert turns(server, 1)[0][1] == 0


CONFIGS = {
    "windows": ("Gemma3Text", "Gemma3ForCausalLM", {
        "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}),
    "states": ("Qwen3_5Text", "Qwen3_5ForCausalLM", {
        "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"]}),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_reads_what_is_new(live, tokenizer, kind):
    config, model, own = CONFIGS[kind]
    if not hasattr(transformers, model):
        pytest.skip(f"this transformers has no {model}")
    torch.manual_seed(0)
    made = getattr(transformers, model)(
        getattr(transformers, f"{config}Config")(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=8,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=4096, eos_token_id=0, pad_token_id=0,
            bos_token_id=0, **own,
        )
    ).eval()  # fmt: skip
    other = copy.deepcopy(tokenizer)
    other.chat_template = FAMILIES["qwen3"]
    service = assemble(made, other, "tiny", ServeConfig(learn_idle=True))
    server = live(service.backend, other, service=service)
    first, *others = turns(server, 3, said="Yes.")
    assert first[0] > 150 and all(read < 40 and cached > 150 for read, cached, _ in others)
    plain = turns(server, 3, said="Yes.", cache_prompt=False, speculative=False)
    assert [said for *_, said in plain] == [said for *_, said in [first, *others]]
    if (bigrams := made.speculation.drafters.bigrams) is not None:
        wait_for(lambda: not len(bigrams.missing))  # between requests
