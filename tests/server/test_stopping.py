"""Text that comes in tokens: what of it is shown, and where it ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieve_spec.server.text import StopRules, StopScanner, TextCodec


def scan(codec, text, rules, step=3, clock=lambda: 0.0):
    ids, shown = codec.encode(text), ""
    scanner = StopScanner(codec, rules, clock)
    for at in range(0, len(ids), step):
        scanner.push(ids[at : at + step])
        shown += scanner.visible()
        if scanner.stopped:
            break
    scanner.finish()
    assert scanner.text == shown + scanner.visible()
    return scanner


def test_code_cannot_smuggle_control_tokens(codec):
    text = "x = '<|fim_suffix|><|endoftext|><|im_start|>'"
    ids = codec.encode(text)
    assert min(ids) > 8
    assert codec.decode(ids) == text
    assert 3 in codec.encode_prompt(text)


def test_segments_begin_as_written(codec, metaspace):
    for one in (codec, TextCodec(metaspace)):
        for text in ("urn x", " urn", "\n    return", "a", "  ", "é"):
            assert one.decode(one.encode("a") + one.encode(text)) == "a" + text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd\0"), max_size=60))
def test_the_text_of_single_tokens_of_any_text(codec, text):
    assert scan(codec, text, StopRules(), 1).text == text


def test_half_a_character_is_held_back_unless_the_model_ends_in_it(codec):
    ids = codec.encode("a 🎉")
    assert codec.decode(ids[:-1]).endswith("\ufffd")
    for rules, count in ((StopRules(len(ids) - 1), len(ids)), (StopRules(), len(ids) - 1)):
        scanner = StopScanner(codec, rules)
        scanner.push(ids[:count])
        scanner.finish()
        assert scanner.text == "a "
    scanner = StopScanner(codec, StopRules(end_ids=frozenset({0})))
    scanner.push([*ids[:-1], 0])
    assert scanner.text == codec.decode(ids[:-1])


@pytest.mark.parametrize(
    ("text", "words", "shown", "word"),
    [
        ("first\nsecond STOP here third", ("OP he", "zzz"), "first\nsecond ST", "OP he"),
        ("abc def ghi", ("ghi", "c d"), "ab", "c d"),  # the earliest wins
    ],
)
def test_a_stop_word_across_tokens_is_cut(codec, text, words, shown, word):
    scanner = scan(codec, text, StopRules(words=words))
    assert (scanner.text, scanner.stop_type, scanner.stopping_word) == (shown, "word", word)


@pytest.mark.parametrize("step", [1, 2, 5, 50])
@pytest.mark.parametrize(
    ("text", "least", "shown"),
    [
        ("x = 1\n        y = 2\n    return y\n", 8, "x = 1\n        y = 2\n    "),
        ("a\n        b\n\nc = 1\n", 4, "a\n        b\n"),
    ],
)
def test_a_less_indented_line_is_cut_after_its_blanks(codec, text, least, shown, step):
    scanner = scan(codec, text, StopRules(min_indent=least), step)
    assert (scanner.text, scanner.stop_type) == (shown, "limit")


@pytest.mark.parametrize(
    ("text", "shown", "stop"),
    [("alpha beta gamma delta\nepsilon zeta\n", "alpha beta gamma delta\n", "limit"), ("word " * 50,) * 2 + ("none",)],
)
def test_a_time_limit_waits_for_a_newline(codec, text, shown, stop):
    now = iter(range(1000))
    scanner = scan(codec, text, StopRules(newline_after_s=3.0), 1, lambda: float(next(now)))
    assert (scanner.text, scanner.stop_type) == (shown, stop)


@given(st.text(alphabet="ab \n", max_size=40), st.text(alphabet="ab \n", min_size=1, max_size=4), st.integers(1, 7))
def test_text_before_the_first_stop_word(codec, text, word, step):
    assert scan(codec, text, StopRules(words=(word,)), step).text == text.split(word)[0]


def test_of_a_word_that_says_more_than_was_begun_one_token_counts(codec):
    """What it says beyond may take several tokens of its own to say again; the model said one."""
    text, rest = next(
        (text, rest)
        for text in (codec.decode([i]) for i in range(300, 8000))
        for rest in [text[3:]]
        if text.isascii() and len(codec.encode(text)) == 1 and len(codec.encode(rest)) > 1
    )
    scanner = StopScanner(codec, StopRules(max_tokens=3, begun=text[:3]))
    said = [*codec.encode(text), *codec.encode(" = 1 + 2")]
    assert scanner.push(said) == 3
    assert scanner.text == rest + codec.decode(said[1:3])
    assert scanner.counted == 3
    assert len(scanner.shown_ids) > 3
