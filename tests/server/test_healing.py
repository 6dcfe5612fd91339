"""Token healing: which tokens agree with what was begun, and what of a line may be the beginning of a token."""

import pytest

from retrieve_spec.config import ServeConfig
from retrieve_spec.server.run import assemble
from retrieve_spec.server.sampling import Beginnings
from retrieve_spec.server.text import TextCodec


@pytest.fixture(scope="module")
def beginnings(codec):
    return Beginnings(codec)


@pytest.mark.parametrize("begun", [" r", " retur", "(", "    ", "größ", "_", "zqxj", "\N{PILE OF POO}x"])
def test_tokens_agree_that_begin_a_text_or_begin_with_it(beginnings, codec, begun):
    control = {i for text, i in codec.vocab.items() if text.startswith("<|")}
    naive = set()
    for token_id in set(codec.vocab.values()) - control:
        piece = codec.tokenizer.convert_ids_to_tokens(token_id)
        said = codec.tokenizer.convert_tokens_to_string([piece])
        if "\N{REPLACEMENT CHARACTER}" not in said and said and (said.startswith(begun) or begun.startswith(said)):
            naive.add(token_id)
    agreeing = set(beginnings.agreeing(begun.encode()))
    assert len(agreeing) == len(beginnings.agreeing(begun.encode()))
    halves = {i for i in agreeing if "\N{REPLACEMENT CHARACTER}" in codec.decode([i])}
    assert agreeing - halves == naive
    assert bool(halves) == (not begun[0].isascii())
    assert not agreeing & control


@pytest.mark.parametrize(
    ("line", "begun"),
    [("    retur", " retur"), ("self.fo", ".fo"), ("f(", "("), ("    ", "    "), ("", ""), ("x" * 100, "")],
)
def test_the_last_word_of_a_line_is_begun(beginnings, line, begun):
    assert beginnings.of(line) == begun


def test_vocabularies_that_spell_no_bytes_are_left_alone(metaspace, tiny, caplog):
    beginnings = Beginnings(TextCodec(metaspace))
    assert not beginnings.possible and beginnings.of("    ab") == ""
    assemble(tiny, metaspace, "tiny", ServeConfig())  # which tries requests of every kind
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
