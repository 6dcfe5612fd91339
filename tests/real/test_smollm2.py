"""A chat model that people run: text with drafts is text without, over sixty prompts and the options people use."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from prompts import PROMPTS
from waiting import wait_for

import retrieve_spec as rs
from retrieve_spec.config import ServeConfig
from retrieve_spec.kernels.cpu.row_programs import CAN_RUN
from retrieve_spec.reference_model import load_model

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 11}
WAYS = 10
"""Ways of asking; each prompt is asked in one of them."""
TIE = 2.0**-5
"""Share of the greater of two logits by which they differ at most where 16 bits decide between them."""


class Chat:
    """A model that is accelerated, whose answers to prompts are compared."""

    def __init__(self, name: str, **options: Any) -> None:
        self.model, self.tokenizer = load_model(name, device="cpu", **options)
        self.tokenizer.padding_side = "left"
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        rs.accelerate(self.model, self.tokenizer, session=True)

    def encoded(self, *turns: str) -> dict[str, torch.Tensor]:
        """A conversation up to the next answer."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        return dict(
            self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        )

    def plain(self, *turns: str, **options: Any) -> list[int]:
        """The answer of the original `generate`."""
        return self._answer(type(self.model).generate.__get__(self.model), turns, options)

    def ours(self, *turns: str, **options: Any) -> list[int]:
        """The answer of the accelerated one."""
        return self._answer(self.model.generate, turns, options)

    def _answer(self, generate: Any, turns: Sequence[str], options: dict[str, Any]) -> list[int]:
        inputs = self.encoded(*turns)
        text: list[int] = generate(**inputs, **{**GREEDY, **options})[0, inputs["input_ids"].shape[1] :].tolist()
        return text


@pytest.fixture(scope="module")
def chat(smollm2: str) -> Chat:
    return Chat(smollm2, dtype="float32")


def own(number: int) -> list[str]:
    """The prompts that are asked in one way: some of each kind."""
    return PROMPTS[number::WAYS]


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (0, {}),
        (1, {"stop_strings": [". ", "\n"]}),
        (2, {"repetition_penalty": 1.3}),
        (3, {"no_repeat_ngram_size": 3, "min_new_tokens": 12}),
    ],
    ids=["alone", "stop strings", "penalty", "no repeated n-grams"],
)
def test_options(chat: Chat, number: int, options: dict[str, Any]) -> None:
    given = options | ({"tokenizer": chat.tokenizer} if "stop_strings" in options else {})
    for prompt in own(number):
        assert chat.ours(prompt, **given) == chat.plain(prompt, **given)
    assert chat.model.speculation.last.pass_kind == "recorded"


def test_streams(chat: Chat) -> None:
    for prompt in own(4):
        stream = rs.generate_stream(chat.model, chat.encoded(prompt), **GREEDY)
        assert [token for piece in stream for token in piece.token_ids.tolist()] == chat.plain(prompt)


def test_a_left_padded_batch_and_requests(chat: Chat) -> None:
    prompts = own(5)
    texts = [chat.tokenizer.decode(chat.encoded(prompt)["input_ids"][0]) for prompt in prompts]
    batch = chat.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    expected = type(chat.model).generate(chat.model, **batch, **GREEDY)
    assert torch.equal(chat.model.generate(**batch, **GREEDY), expected)
    done = rs.generate_many(chat.model, [chat.encoded(prompt) for prompt in prompts], **GREEDY)
    assert [one.token_ids.tolist() for one in done] == [chat.plain(prompt) for prompt in prompts]


def test_second_turns(chat: Chat) -> None:
    for prompt in own(6):
        said = chat.tokenizer.decode(chat.ours(prompt), skip_special_tokens=True)
        assert chat.ours(prompt, said, "Say that again.") == chat.plain(prompt, said, "Say that again.")


def test_a_store_of_a_call(chat: Chat, tmp_path: Path) -> None:
    expected = [chat.plain(prompt) for prompt in own(7)]
    said = [chat.tokenizer.decode(answer, skip_special_tokens=True) for answer in expected]
    (tmp_path / "a.txt").write_text("\n".join(said), encoding="utf-8")
    rs.build_datastore(tmp_path / "store", [str(tmp_path / "a.txt")], chat.tokenizer)
    store = rs.open_datastore(tmp_path / "store")
    assert [chat.ours(prompt, store=store) for prompt in own(7)] == expected


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_json_schema(chat: Chat, options: dict[str, Any]) -> None:
    pytest.importorskip("llguidance", reason="pip install 'retrieve-spec[json]'")
    kinds = {"title": "string", "is_question": "boolean", "number_of_words": "integer"}
    schema = {"type": "object", "properties": {k: {"type": v} for k, v in kinds.items()}, "required": list(kinds)}
    for prompt in own(8)[:3]:
        held = rs.GrammarProcessor.of(chat.tokenizer, json_schema=schema)
        given = {**options, "max_new_tokens": 48, "logits_processor": [held]}
        off = chat.ours(prompt, **given, draft="off")
        assert chat.ours(prompt, **given) == off


def test_samples(chat: Chat) -> None:
    for prompt in own(9):
        given = {**SAMPLED, "num_return_sequences": 2}
        off = chat.model.generate(**chat.encoded(prompt), **given, draft="off")
        assert torch.equal(chat.model.generate(**chat.encoded(prompt), **given), off)


@pytest.mark.skipif(not CAN_RUN, reason="nothing is compiled")
@pytest.mark.parametrize("form", [{"quantize": "int8"}, {"quantize": "int4"}, {"dtype": "bfloat16"}], ids=str)
def test_drafts_change_no_bit(smollm2: str, form: dict[str, str]) -> None:
    chat = Chat(smollm2, **form)
    for prompt in PROMPTS[3::12]:
        assert chat.ours(prompt) == chat.ours(prompt, draft="off")
        assert chat.ours(prompt, **SAMPLED) == chat.ours(prompt, **SAMPLED, draft="off")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_what_differs_is_a_near_tie(smollm2: str, dtype: str) -> None:
    chat = Chat(smollm2, dtype=dtype)
    for prompt in PROMPTS[5::12]:
        ours, plain = chat.ours(prompt), chat.plain(prompt)
        same = next((i for i, pair in enumerate(zip(ours, plain, strict=False)) if pair[0] != pair[1]), None)
        if same is None:
            continue
        ids = torch.cat([chat.encoded(prompt)["input_ids"], torch.tensor([plain[:same]], dtype=torch.long)], 1)
        with torch.no_grad():
            logits = chat.model(ids).logits[0, -1].float()
        mine, theirs = logits[ours[same]], logits[plain[same]]
        assert abs(mine - theirs) <= TIE * max(abs(mine), abs(theirs))


def test_chats_of_the_server_are_those_of_transformers(chat: Chat, smollm2: str) -> None:
    pytest.importorskip("fastapi", reason="pip install 'retrieve-spec[serve]'")
    from starlette.testclient import TestClient

    from retrieve_spec.server.app import create_app
    from retrieve_spec.server.models import Models
    from retrieve_spec.server.run import assemble

    other = Chat(smollm2, dtype="float32")
    rs.restore(other.model)
    app = create_app(Models.of(assemble(other.model, other.tokenizer, "smollm2", ServeConfig())))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        wait_for(lambda: client.get("/health").status_code == 200)
        for prompt in PROMPTS[7::12]:
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 24, "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body).json()
            said = chat.tokenizer.decode(chat.plain(prompt), skip_special_tokens=True)
            assert answer["choices"][0]["message"]["content"] == said.removesuffix("�")
