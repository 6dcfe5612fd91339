"""`generate` of an accelerated model: same signature, same output, same side effects."""

import copy
import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from scripted_drafter import ScriptedDrafter
from transformers import DynamicCache, GenerationConfig, GPT2Config, GPT2LMHeadModel, GPT2Model
from transformers.generation.stopping_criteria import StoppingCriteria

import retrieve_spec as rs
from retrieve_spec import errors

BARE = GPT2Model(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1))
GREEDY = {"do_sample": False, "max_new_tokens": 24}


def answer_of(model: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(prompt, **(GREEDY | options))


def scripted(model: Any, answer: Any, script: str = "right", **options: Any) -> ScriptedDrafter:
    drafter = ScriptedDrafter(answer[0], script, length=9)
    rs.accelerate(model, drafter=drafter, nodes=32, **options)
    return drafter


class Tokenizer:
    """Letters for tokens, enough for predictions."""

    def __init__(self, size: int = 199) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        return {"input_ids": [ord(letter) - 256 for letter in text]}


def test_signature_and_restore(tiny: Any, prompt: torch.Tensor) -> None:
    before = inspect.signature(tiny.generate)
    expected = answer_of(tiny, prompt)
    drafter = scripted(tiny, expected)
    assert inspect.signature(tiny.generate) == before
    assert torch.equal(answer_of(tiny, prompt), expected)
    assert drafter.started == 1
    assert rs.restore(tiny) is tiny
    assert "generate" not in vars(tiny)
    assert not hasattr(tiny, "speculation")
    assert torch.equal(answer_of(tiny, prompt), expected)
    assert drafter.started == 1
    assert rs.restore(tiny) is tiny, "restoring twice does nothing"


def test_context_manager_restores_after_an_error(tiny: Any) -> None:
    with rs.accelerated(tiny, draft="off") as model:
        assert model is tiny
        assert hasattr(tiny, "speculation")
    assert not hasattr(tiny, "speculation")
    with pytest.raises(ZeroDivisionError), rs.accelerated(tiny, draft="off"):
        1 / 0  # noqa: B018
    assert not hasattr(tiny, "speculation")


def test_a_generate_set_before_is_called_and_put_back(tiny: Any, prompt: torch.Tensor) -> None:
    calls = []

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return type(tiny).generate(tiny, *args, **kwargs)

    tiny.generate = mine
    try:
        rs.accelerate(tiny, draft="off")
        answer_of(tiny, prompt)
        assert len(calls) == 1
        rs.restore(tiny)
        assert tiny.generate is mine
    finally:
        del tiny.generate


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
    assert torch.equal(answer_of(tiny, prompt, draft="off"), expected)
    assert tiny.speculation.last.passes == 24
    assert (tiny.speculation.last.mode, tiny.speculation.last.reason) == ("plain", "drafting is off")
    assert torch.equal(answer_of(tiny, prompt, nodes=0), expected)
    assert tiny.speculation.last.nodes == 0
    assert drafter.started == 0
    assert torch.equal(answer_of(tiny, prompt, nodes=3), expected)
    assert {budget.max_nodes for budget in drafter.budgets} <= {3, 0}
    assert all(budget.cost is None for budget in drafter.budgets)


def test_prediction_reaches_the_drafter(tiny: Any, prompt: torch.Tensor) -> None:
    drafter = scripted(tiny, answer_of(tiny, prompt), tokenizer=Tokenizer())
    for prediction in ([5, 6, 7], np.array([5, 6, 7]), torch.tensor([[5, 6, 7]]), chr(261) + chr(262) + chr(263)):
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
    drafter = scripted(tiny, plain, script)
    torch.manual_seed(11)
    assert torch.equal(tiny.generate(prompt, **options), plain)
    assert tiny.speculation.last.tokens_per_pass > 1.2
    torch.manual_seed(12)
    assert not torch.equal(tiny.generate(prompt, **options), plain), "the seed comes from torch's generator"
    assert torch.equal(tiny.generate(prompt, seed=5, **options), tiny.generate(prompt, seed=5, nodes=2, **options)), (
        "a given seed fixes the text"
    )
    assert drafter.finished == 4


class StopAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length, self.calls = length, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return torch.tensor([input_ids.shape[1] >= self.length])


def test_a_cache_without_config(tiny: Any, prompt: torch.Tensor) -> None:
    expected = answer_of(tiny, prompt)
    scripted(tiny, expected, "branchy")
    cache = DynamicCache()
    assert torch.equal(answer_of(tiny, prompt, past_key_values=cache), expected)
    assert cache.get_seq_length() == 35


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
def test_length_without_end_costs_no_memory(tiny: Any, prompt: torch.Tensor, recorded_pass: Any) -> None:
    """Nothing is allocated for tokens that may never come."""
    padded = {"attention_mask": torch.ones_like(prompt).index_fill(1, torch.tensor([0, 1]), 0)}
    for given in ({}, padded):
        options = {"max_new_tokens": 1 << 40, "do_sample": False, **given}
        expected = tiny.generate(prompt, stopping_criteria=[StopAt(40)], **options)
        rs.accelerate(tiny, recorded_pass=recorded_pass)
        assert torch.equal(tiny.generate(prompt, stopping_criteria=[StopAt(40)], **options), expected)
        assert tiny.speculation.last.mode == "tree"
        pieces = rs.generate_stream(
            tiny, {"input_ids": prompt, **given}, stopping_criteria=[StopAt(40)], max_new_tokens=1 << 40
        )
        assert [t for piece in pieces for t in piece.token_ids.tolist()] == expected[0, 12:].tolist()
        rs.restore(tiny)


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


def test_learned_positions_end_as_in_plain_generate() -> None:
    config = GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2, n_positions=16, eos_token_id=None)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]])
    expected = model.generate(ids, max_length=16, do_sample=False, pad_token_id=0)
    scripted(model, expected)
    assert torch.equal(model.generate(ids, max_length=16, do_sample=False, pad_token_id=0), expected)
    with pytest.raises(IndexError, match=r"at most 16 tokens.*got 17, of which 10") as raised:
        model.generate(ids, max_length=20, do_sample=False, pad_token_id=0)
    assert isinstance(raised.value, errors.PositionError), "as plain generate's, and clear"
    assert "out of range" in str(raised.value.__cause__)
    rs.accelerate(model, nodes=8)  # a drafter that was given serves one row
    batch = torch.tensor([[0, 0, 0, 0, 5, 6], [5, 6, 7, 8, 9, 10]])
    mask = (batch > 0).long()
    whole = model.generate(batch, attention_mask=mask, max_length=16, do_sample=False, pad_token_id=0)
    assert whole.shape == (2, 16)
    with pytest.raises(errors.PositionError, match="got 17, of which 6"):
        model.generate(batch, attention_mask=mask, max_length=20, do_sample=False, pad_token_id=0)


def test_drafts_end_at_the_last_learned_position_behind_a_cache() -> None:
    """The row knows only its new tokens; the cache holds the rest."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2, n_positions=16, eos_token_id=None)
    model = GPT2LMHeadModel(config).eval()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])

    def continued() -> torch.Tensor:
        cache = DynamicCache(config=config)
        with torch.no_grad():
            model(ids[:, :4], past_key_values=cache)
        given = {"past_key_values": cache, "attention_mask": torch.ones_like(ids), "stopping_criteria": [StopAt(12)]}
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
    together = threading.Barrier(6)

    def wait_for_others(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if len(engine._sequences) == 1:  # on a busy machine it would be at its end before another began
            time.sleep(0.01)
        return torch.zeros(len(ids), dtype=torch.bool)

    def ask(i: int) -> bool:
        together.wait()
        return torch.equal(answer_of(tiny, prompts[i], stopping_criteria=[wait_for_others]), expected[i])

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(ask, range(6))) == [True] * 6
    assert engine.steps < 6 * 24, "steps that took several along"


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
    ids = prompt.clone()
    ids[0, 5] = unknown
    rs.accelerate(tiny, nodes=8)
    expected = tiny.generate(prompt, max_new_tokens=6, do_sample=False)
    message = rf"token ids below 199.*got {unknown}\. Encode the prompt with the model's own tokenizer"
    with pytest.raises(IndexError, match=message) as raised:
        tiny.generate(ids, max_new_tokens=6, do_sample=False)
    assert isinstance(raised.value, errors.UnknownTokenError)
    with pytest.raises(errors.UnknownTokenError, match=message):
        list(rs.generate_stream(tiny, ids, max_new_tokens=6))
    finished = list(rs.generate_many(tiny, [ids[0].tolist(), prompt[0].tolist()], max_new_tokens=6, do_sample=False))
    assert isinstance(finished[0].error, errors.UnknownTokenError) and finished[1].error is None
    assert finished[1].token_ids.tolist() == expected[0, prompt.shape[1] :].tolist()


ACCELERATE: list[tuple[Any, type[Exception], str]] = [
    ({"given": torch.nn.Linear(2, 2)}, errors.UnsupportedModelError, "got Linear"),
    ({"given": "gpt2"}, errors.UnsupportedModelError,
     r"got 'gpt2'\. Load it with AutoModelForCausalLM\.from_pretrained\('gpt2'\)"),
    ({"given": BARE}, errors.UnsupportedModelError, "got GPT2Model, which has no head for the next token"),
    ({"tokenizer": Tokenizer(500)}, errors.TokenizerMismatchError, "at most 199 tokens"),
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
