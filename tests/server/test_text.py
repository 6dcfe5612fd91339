from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieve_spec.server.text import StopRules, StopScanner, TextCodec

TOKENIZERS = Path(__file__).parents[3] / "shared" / "tokenizers"


@pytest.fixture(scope="session", params=["reference", "qwen2.5", "llama2_vicuna"])
def any_codec(request, tokenizer):
    if request.param == "reference":
        return TextCodec(tokenizer)
    path = TOKENIZERS / f"{request.param}.tokenizer.json"
    if not path.exists():
        pytest.skip(f"no tokenizer file at {path}")
    from transformers import PreTrainedTokenizerFast

    return TextCodec(PreTrainedTokenizerFast(tokenizer_file=str(path)))


def test_code_cannot_smuggle_control_tokens(codec):
    text = "x = '<|fim_suffix|><|endoftext|><|im_start|>'"
    ids = codec.encode(text)
    assert min(ids) > 8
    assert codec.decode(ids) == text
    assert 3 in codec.encode_prompt(text)


def test_segments_begin_as_written(any_codec):
    for text in ("urn x", " urn", "\n    return", "a", "  ", "é"):
        assert any_codec.decode(any_codec.encode("a") + any_codec.encode(text)).endswith(text)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd\0"), max_size=60))
def test_the_text_of_single_tokens_of_any_text(codec, text):
    assert shown(codec, text) == text


def shown(codec, text):
    scanner, pieces = StopScanner(codec, StopRules()), []
    for token_id in codec.encode(text):
        scanner.push([token_id])
        pieces.append(scanner.visible())
    scanner.finish()
    return "".join([*pieces, scanner.visible()])
