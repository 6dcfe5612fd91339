"""`generate` of an accelerated model: same signature, same output, same side effects."""

import contextlib
import copy
import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from batch_rows import left_padded, small_model
from number_tokens import number_tokenizer
from scripted_drafter import ScriptedDrafter
from transformers import DynamicCache, GenerationConfig, GPT2Config, GPT2Model, PreTrainedTokenizerFast

import retrieve_spec as rs
from retrieve_spec import errors

BARE = GPT2Model(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1))
COMPILED = torch.compile(BARE, backend="eager")
GREEDY = {"do_sample": False, "max_new_tokens": 24}


def answer_of(model: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(prompt, **(GREEDY | options))


def scripted(model: Any, answer: Any, script: str = "right", **options: Any) -> ScriptedDrafter:
    drafter = ScriptedDrafter(answer[0], script, length=9)
    rs.accelerate(model, drafter=drafter, nodes=32, **options)
    return drafter


def numbers(size: int) -> Any:
    """A tokenizer of so many tokens."""
    return PreTrainedTokenizerFast(tokenizer_object=number_tokenizer(size))


def test_signature_and_restore(tiny: Any, prompt: torch.Tensor) -> None:
    before = inspect.signature(tiny.generate)
    expected = answer_of(tiny, prompt)
    drafter = scripted(tiny, expected)
    assert inspect.signature(tiny.generate) == before
    assert torch.equal(answer_of(tiny, prompt), expected)
    for _ in range(2):  # restoring twice does nothing
        assert rs.restore(tiny) is tiny
        assert not {"generate", "speculation"} & set(vars(tiny))
    assert torch.equal(answer_of(tiny, prompt), expected)
    assert drafter.started == 1


def test_context_manager_restores_after_an_error(tiny: Any) -> None:
    with contextlib.suppress(ZeroDivisionError), rs.accelerated(tiny, draft="off") as model:
        assert model is tiny and hasattr(tiny, "speculation")
        raise ZeroDivisionError
    assert not hasattr(tiny, "speculation")


def test_a_generate_set_before_is_called_and_put_back(tiny: Any, prompt: torch.Tensor) -> None:
    model = copy.copy(tiny)
    model.generate = mine = Mock(wraps=model.generate)
    rs.accelerate(model, draft="off")
    answer_of(model, prompt)
    assert mine.call_count == 1
    rs.restore(model)
    assert model.generate is mine


def test_a_copy_of_the_model_generates_with_its_own_weights(tiny: Any, prompt: torch.Tensor, caplog: Any) -> None:
    expected = answer_of(tiny, prompt)
    rs.accelerate(tiny, draft="off")
    other = copy.deepcopy(tiny)
    assert "a deep copy of an accelerated model decodes plainly: call" in caplog.text
    for own in ({"draft": "off"}, {"nodes": 0}, {"seed": 3}, {"return_logprobs": True}):
        with pytest.raises(errors.ConfigError, match=r"an accelerated model, got LlamaForCausalLM\. Call"):
            answer_of(other, prompt, **own)
    assert torch.equal(answer_of(other, prompt), expected)
    assert tiny.speculation.last is None, "a copy is not accelerated"
    with torch.no_grad():
        other.lm_head.weight.neg_()
    assert torch.equal(answer_of(tiny, prompt), expected)
    assert not torch.equal(answer_of(other, prompt), expected)


def test_draft_off_and_nodes_per_call(tiny: Any, prompt: torch.Tensor) -> None:
    expected = answer_of(tiny, prompt)
    drafter = scripted(tiny, expected)
    for without in ({"draft": "off"}, {"nodes": 0}):
        assert torch.equal(answer_of(tiny, prompt, **without), expected)
        last = tiny.speculation.last
        assert (last.mode, last.reason, last.passes, drafter.started) == ("plain", "drafting is off", 24, 0)
    assert torch.equal(answer_of(tiny, prompt, nodes=3), expected)
    assert {(budget.max_nodes, budget.cost) for budget in drafter.budgets} <= {(3, None), (0, None)}


def test_prediction_reaches_the_drafter(tiny: Any, prompt: torch.Tensor) -> None:
    drafter = scripted(tiny, answer_of(tiny, prompt), tokenizer=numbers(199))
    for prediction in ([5, 6, 7], np.array([5, 6, 7]), torch.tensor([[5, 6, 7]]), "5 6 7"):
        answer_of(tiny, prompt, prediction=prediction)
        assert drafter.prediction_ids.tolist() == [5, 6, 7]
        assert drafter.prediction_ids.dtype == np.int32
    answer_of(tiny, prompt)
    assert drafter.prediction_ids is None


def test_generation_config_is_honoured(tiny: Any, prompt: torch.Tensor) -> None:
    config = GenerationConfig(max_new_tokens=9, do_sample=False, repetition_penalty=1.3)
    expected = tiny.generate(prompt, generation_config=config)
    scripted(tiny, expected)
    assert torch.equal(tiny.generate(prompt, generation_config=config), expected)
    assert torch.equal(tiny.generate(prompt, config), expected), "positional"
    ones = torch.ones_like(prompt)
    assert torch.equal(tiny.generate(inputs=prompt, attention_mask=ones, generation_config=config), expected)


SAMPLED = [
    {},
    {"temperature": 0.7, "top_k": 0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 0},
    {"top_k": 5},
    {"min_p": 0.1, "top_k": 0},
    {"temperature": 0.9, "repetition_penalty": 1.2},
    {"typical_p": 0.8},
    {"epsilon_cutoff": 0.01},
]


@pytest.mark.parametrize("options", SAMPLED, ids=str)
@pytest.mark.parametrize("script", ["right", "branchy"])
def test_sampled_output_is_the_same_with_drafting(tiny: Any, prompt: torch.Tensor, options: Any, script: str) -> None:
    options = {"do_sample": True, "max_new_tokens": 24} | options
    rs.accelerate(tiny, draft="off")
    torch.manual_seed(11)
    plain = tiny.generate(prompt, **options)
    scripted(tiny, plain, script)
    torch.manual_seed(11)
    assert torch.equal(tiny.generate(prompt, **options), plain)
    assert tiny.speculation.last.tokens_per_pass > 1.2
    assert not torch.equal(tiny.generate(prompt, **options), plain), "the seed comes from torch's generator"


def stop_at(length: int) -> Any:
    """Criteria that end a text at a length."""
    return [lambda input_ids, scores, **_: torch.tensor([input_ids.shape[1] >= length])]


DELEGATED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 2}, "beams"),
    ({"num_return_sequences": 2, "do_sample": True}, "several sequences"),
    ({"prompt_lookup_num_tokens": 3}, "prompt lookup"),
    ({"use_cache": False}, "cache is switched off"),
    ({"cache_implementation": "static", "max_cache_len": 64}, "cache implementation"),
    ({"output_attentions": True, "return_dict_in_generate": True}, "attentions"),
    ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden states"),
    ({"prefill_chunk_size": 4}, "in chunks"),
    ({"guidance_scale": 1.5}, "guidance"),
]


@pytest.mark.parametrize(("options", "reason"), DELEGATED, ids=lambda value: str(value)[:24])
def test_what_is_left_to_the_original(tiny: Any, prompt: torch.Tensor, options: Any, reason: str) -> None:
    torch.manual_seed(3)
    expected = answer_of(tiny, prompt, **options)
    scripted(tiny, answer_of(tiny, prompt))
    torch.manual_seed(3)
    got = answer_of(tiny, prompt, **options)
    assert torch.equal(getattr(got, "sequences", got), getattr(expected, "sequences", expected))
    assert tiny.speculation.last.mode == "delegated"
    assert reason in tiny.speculation.last.reason


def test_gradient_checkpointing_switches_the_cache_off(tiny: Any, prompt: torch.Tensor) -> None:
    """While the model is trained: every step of `generate` then sees the last token alone."""
    tiny.gradient_checkpointing_enable()
    trained, evaluated = answer_of(tiny.train(), prompt), answer_of(tiny.eval(), prompt)
    scripted(tiny, evaluated)
    assert torch.equal(answer_of(tiny.train(), prompt), trained)
    assert "cache is switched off" in tiny.speculation.last.reason
    assert torch.equal(answer_of(tiny.eval(), prompt), evaluated)
    assert tiny.speculation.last.mode == "tree"


@pytest.mark.parametrize("recorded_pass", ["off", "always"])
@pytest.mark.parametrize("padding", [0, 2])
def test_length_without_end_costs_no_memory(tiny: Any, prompt: torch.Tensor, padding: int, recorded_pass: Any) -> None:
    """Nothing is allocated for tokens that may never come."""
    inputs = {"input_ids": prompt, "attention_mask": (torch.arange(12) >= padding).long()[None]}
    options = {"max_new_tokens": 1 << 40, "do_sample": False, "stopping_criteria": stop_at(40)}
    expected = tiny.generate(**inputs, **options)
    rs.accelerate(tiny, recorded_pass=recorded_pass)
    assert torch.equal(tiny.generate(**inputs, **options), expected)
    assert tiny.speculation.last.mode == "tree"
    pieces = rs.generate_stream(tiny, inputs, **options)
    assert [t for piece in pieces for t in piece.token_ids.tolist()] == expected[0, 12:].tolist()


@pytest.mark.parametrize("beams", [1, 2])
def test_seeds_of_any_kind_of_whole_number(tiny: Any, prompt: torch.Tensor, beams: int) -> None:
    """By each door, decoded here or by the original `generate`; what is none is named."""
    rs.accelerate(tiny, draft="off")
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 6, "num_beams": beams}
    for seed in (5, -5, (1 << 64) - 1):
        said = tiny.generate(prompt, seed=seed, **options)
        assert torch.equal(tiny.generate(prompt, seed=seed, **options), said)
        if seed == 5:
            for same in (np.int64(5), np.uint8(5), np.int32(5)):
                assert torch.equal(tiny.generate(prompt, seed=same, **options), said)
                (done,) = rs.generate_many(tiny, [prompt[0]], seed=same, **options)
                assert done.token_ids.tolist() == said[0, 12:].tolist()
    for wrong in ("a", 1.5, [1], 1 << 64, -(1 << 63) - 1):
        with pytest.raises(errors.ConfigError, match="seed to be a whole number of 64 bits, got"):
            tiny.generate(prompt, seed=wrong, **options)


def sixteen_positions() -> Any:
    return small_model("gpt2", n_embd=32, n_layer=1, n_head=2, n_positions=16, max_position_embeddings=16)


def test_learned_positions_end_as_in_plain_generate() -> None:
    model, ids = sixteen_positions(), torch.arange(5, 15)[None]
    options = {"do_sample": False, "pad_token_id": 0}
    scripted(model, model.generate(ids, max_length=16, **options))
    with pytest.raises(IndexError, match=r"at most 16 tokens.*got 17, of which 10") as raised:
        model.generate(ids, max_length=20, **options)
    assert isinstance(raised.value, errors.PositionError), "as plain generate's, and clear"
    assert "out of range" in str(raised.value.__cause__)
    rs.accelerate(model, nodes=8)  # a drafter that was given serves one row
    batch = left_padded((2, 6))
    assert model.generate(**batch, max_length=16, **options).shape == (2, 16)
    with pytest.raises(errors.PositionError, match="got 17, of which 6"):
        model.generate(**batch, max_length=20, **options)


def test_drafts_end_at_the_last_learned_position_behind_a_cache() -> None:
    """The row knows only its new tokens; the cache holds the rest."""
    model, ids = sixteen_positions(), torch.arange(5, 11)[None]

    def continued() -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :4], past_key_values=cache)
        given = {"past_key_values": cache, "attention_mask": torch.ones_like(ids), "stopping_criteria": stop_at(12)}
        return answer_of(model, ids[:, 4:], **given, pad_token_id=0)

    expected = continued()
    drafter = scripted(model, torch.cat([expected, expected], dim=1))
    drafter.length = 15
    assert torch.equal(continued(), expected) and expected.shape == (1, 12)
    assert drafter.budgets[0].max_depth == 16 - 4 - 3, "after the cached tokens, the prompt and the first new one"


def test_what_a_tokenizer_gives_without_tensors_is_streamed(tiny: Any, prompt: torch.Tensor) -> None:
    expected = answer_of(tiny, prompt)[0, 12:].tolist()
    rs.accelerate(tiny)
    ids = prompt[0].tolist()
    for given in (
        {"input_ids": ids, "attention_mask": [1] * 12},
        {"input_ids": [ids], "attention_mask": [[1] * 12]},
        {"input_ids": np.array(ids), "attention_mask": np.ones(12, np.int64)},
        ids,
        tuple(ids),
    ):
        pieces = rs.generate_stream(tiny, given, **GREEDY)
        assert [t for piece in pieces for t in piece.token_ids.tolist()] == expected


@pytest.mark.parametrize("recorded_pass", ["off", "always"])
def test_threads_share_passes(tiny: Any, prompt: torch.Tensor, recorded_pass: Any) -> None:
    prompts = [prompt.roll(i, 1) for i in range(6)]
    expected = [answer_of(tiny, ids) for ids in prompts]
    rs.accelerate(tiny, draft="off", recorded_pass=recorded_pass)
    engine = tiny.speculation.engine
    together, shared = threading.Barrier(6), threading.Event()

    def wait_for_others(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if len(engine._sequences) > 1:
            shared.set()
        elif not shared.is_set():  # on a busy machine a text would be at its end before another began
            time.sleep(0.2)
        return torch.zeros(len(ids), dtype=torch.bool)

    def ask(i: int) -> bool:
        together.wait()
        return torch.equal(answer_of(tiny, prompts[i], stopping_criteria=[wait_for_others]), expected[i])

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(ask, range(6))) == [True] * 6
    assert engine.steps < 6 * 24, "steps that took several along"


def test_a_call_that_begins_waits_for_one_step_of_another(tiny: Any, prompt: torch.Tensor) -> None:
    rs.accelerate(tiny, draft="off")
    tokens, under_way = 0, threading.Event()

    def count(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        nonlocal tokens
        tokens += 1
        under_way.set()
        time.sleep(0.02)
        return torch.zeros(len(ids), dtype=torch.bool)

    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(answer_of, tiny, prompt, max_new_tokens=150, stopping_criteria=[count])
        under_way.wait()
        waited = []
        for _ in range(5):
            before = tokens
            tiny.speculation.forget()
            waited.append(tokens - before)
        tiny.speculation.engine.leave(*tiny.speculation.engine._sequences)
        other.result()
    assert max(waited) <= 2, waited


def test_seeds_in_threads_hold_where_the_original_draws(tiny: Any, prompt: torch.Tensor) -> None:
    """All threads draw from one generator of torch."""
    rs.accelerate(tiny, draft="off")
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12, "min_new_tokens": 12, "num_beams": 2}
    expected = [tiny.generate(prompt, seed=seed, **options) for seed in range(3)]
    before = torch.get_rng_state()
    together = threading.Barrier(3)

    def ask(seed: int) -> list[bool]:
        together.wait()
        return [torch.equal(tiny.generate(prompt, seed=seed, **options), expected[seed]) for _ in range(3)]

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(ask, range(3))) == [[True] * 3] * 3
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("unknown", [199, 10**6, -1])
def test_a_token_that_the_model_does_not_embed_is_named(tiny: Any, prompt: Any, unknown: int) -> None:
    """By each door, and without harm to others."""
    ids, options = prompt.clone(), {"max_new_tokens": 6, "do_sample": False}
    ids[0, 5] = unknown
    rs.accelerate(tiny, nodes=8)
    expected = tiny.generate(prompt, **options)
    message = rf"token ids below 199.*got {unknown}\. Encode the prompt with the model's own tokenizer"
    assert issubclass(errors.UnknownTokenError, IndexError)
    for call in (tiny.generate, lambda *given, **named: list(rs.generate_stream(tiny, *given, **named))):
        with pytest.raises(errors.UnknownTokenError, match=message):
            call(ids, **options)
    wrong, right = rs.generate_many(tiny, [ids[0].tolist(), prompt[0].tolist()], **options)
    assert isinstance(wrong.error, errors.UnknownTokenError) and right.error is None
    assert right.token_ids.tolist() == expected[0, 12:].tolist()


ACCELERATE: list[tuple[Any, type[Exception], str]] = [
    ({"given": torch.nn.Linear(2, 2)}, errors.UnsupportedModelError, "got Linear"),
    ({"given": "gpt2"}, errors.UnsupportedModelError,
     r"got 'gpt2'\. Load it with AutoModelForCausalLM\.from_pretrained\('gpt2'\)"),
    ({"given": BARE}, errors.UnsupportedModelError, "got GPT2Model, which has no head for the next token"),
    ({"given": COMPILED}, errors.UnsupportedModelError, r"torch\.compile\(accelerate\(model\)\)"),
    ({"tokenizer": numbers(500)}, errors.TokenizerMismatchError, "at most 199 tokens"),
    ({"tokenizer": "gpt2"}, errors.ConfigError, "a tokenizer, got 'gpt2'. Load it with AutoTokenizer"),
    ({"config": "auto"}, errors.ConfigError, "a SpeculationConfig as config, got 'auto'. Give options by name"),
    ({"drafter": "suffix"}, errors.ConfigError, "a drafter, got 'suffix'. Give options by name: draft="),
    ({"node": 3}, errors.ConfigError, "Did you mean 'nodes'"),
    ({"draft": "nonsense"}, errors.UnknownPresetError, "nonsense"),
    ({"draft": 3}, errors.ConfigError, "draft to be one of"),
    ({"datastores": [3]}, errors.ConfigError, "a datastore's folder, or an open one, got 3. Give its path"),
    ({"datastores": "mystore"}, errors.ConfigError, r"got 'mystore'. Give datastores=\['mystore'\]"),
    ({"rollouts": "rollouts.bin"}, errors.ConfigError, "RolloutMemory"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "said"), ACCELERATE, ids=lambda value: str(value)[:30])
def test_what_accelerate_cannot_take_is_named(tiny: Any, options: Any, error: type[Exception], said: str) -> None:
    options = dict(options)
    with pytest.raises(error, match=said):
        rs.accelerate(options.pop("given", tiny), **options)
    assert not hasattr(tiny, "speculation"), "nothing was changed"


def test_an_accelerated_model_may_be_compiled(tiny: Any, prompt: torch.Tensor) -> None:
    wanted = tiny.generate(prompt, max_new_tokens=9, do_sample=False)
    compiled: Any = torch.compile(rs.accelerate(tiny, recorded_pass="always", nodes=6))
    assert torch.equal(compiled.generate(prompt, max_new_tokens=9, do_sample=False), wanted)
    assert tiny.speculation.last.pass_kind == "recorded"


IDS, SAMPLES = torch.tensor([[5, 6, 7]]), GenerationConfig(num_return_sequences=3, do_sample=True)
CALLS: list[tuple[str, Any, type[Exception], str]] = [
    ("generate", {"nodes": -1}, errors.ConfigError, "nodes"),
    ("generate", {"draft": "nonsense"}, errors.UnknownPresetError, "nonsense"),
    ("generate", {"input_ids": IDS[:, :0]}, errors.PromptError, "prompt"),
    ("generate", {"prediction": "text"}, errors.ConfigError, "tokenizer"),
    ("generate", {"prediction": 3}, errors.ConfigError, "token ids as prediction"),
    ("generate", {"prediction": [[1, 2], [3]]}, errors.ConfigError, "token ids as prediction"),
    *(("generate", {"prediction": wrong}, errors.ConfigError, "prediction of token ids 0 … 198")
      for wrong in ([5, 199], [-1], [2**40], torch.tensor([[7, 500]]), np.array([1.5]))),
    ("generate", {"siblings": "yes"}, errors.ConfigError, "siblings"),
    ("generate", {"seed": "one"}, errors.ConfigError, "seed to be a whole number of 64 bits, got 'one'"),
    ("generate", {"datastores": ["x"]}, errors.ConfigError, "datastores as an option of accelerate, got it in gene"),
    ("generate", {"session": True}, errors.ConfigError, r"Call accelerate\(model, session=…\)"),
    ("generate", {"predicton": [1]}, errors.ConfigError, "got 'predicton'. Did you mean 'prediction'"),
    ("generate", {"input_ids": "def f"}, errors.PromptError,
     r"got str, 'def f'\. Encode the text: generate\(\*\*tokenizer"),
    ("generate", {"input_ids": [[1, 2]]}, errors.PromptError, "shape .rows, tokens., got list"),
    ("generate", {"input_ids": {"input_ids": 1}}, errors.PromptError, r"got dict\. Unpack it: generate\(\*\*inputs\)"),
    ("generate", {"input_ids": IDS[0]}, errors.PromptError, r"got a tensor of shape \(3,\) and int64"),
    ("generate", {"input_ids": IDS.float()}, errors.PromptError, "and float32. Give one row as ids.None."),
    ("stream", {"given": IDS.repeat(2, 1)}, errors.ConfigError, "one row"),
    ("stream", {"given": IDS, "context_ids": [5, 199]}, errors.ConfigError, "context_ids of token ids 0 … 198"),
    ("stream", {"given": {"input_ids": [[1, 2], [3]]}}, errors.ConfigError, "rows of one length"),
    ("stream", {"given": 3}, errors.ConfigError, "expected text or token ids as prompt, got 3"),
    *(("stream", {"given": IDS, **several}, errors.ConfigError,
       r"one sample to stream, got num_return_sequences=3\. Open a stream for each")
      for several in ({"num_return_sequences": 3}, {"generation_config": SAMPLES})),
    ("stream", {"given": IDS, "streamer": 3}, errors.ConfigError, r"without a streamer, got one\. Read the pieces"),
    ("many", {"given": "text"}, errors.ConfigError, r"many requests, got str\. Give a list"),
]  # fmt: skip


@pytest.mark.parametrize(("door", "options", "error", "said"), CALLS, ids=lambda value: str(value)[:30])
def test_what_a_call_cannot_take_is_named(
    tiny: Any, prompt: torch.Tensor, door: str, options: Any, error: type[Exception], said: str
) -> None:
    scripted(tiny, answer_of(tiny, prompt))
    given = {"given": None, **({"input_ids": prompt} if door == "generate" else {}), **options}
    call = {"generate": answer_of, "stream": rs.generate_stream, "many": rs.generate_many}[door]
    with pytest.raises(error, match=said):
        call(tiny, given.pop("given"), **given)
    rs.restore(tiny)
    with pytest.raises(errors.ConfigError, match="accelerate"):
        next(rs.generate_stream(tiny, prompt))
