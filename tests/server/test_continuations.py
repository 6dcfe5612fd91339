from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from retrieve_spec.server.continuations import TextIndex, key_starts, scan_texts
from retrieve_spec.server.memory import Memory, RecentTexts


def naive(left, texts):
    """Longest end of `left`, from a word start, that stands at a word start of a text; how long it is."""
    for start in key_starts(left):
        key = left[start:]
        for text in texts:
            at = text.find(key)
            while at >= 0:
                if (
                    at == 0 or not (text[at - 1].isascii() and (text[at - 1].isalnum() or text[at - 1] == "_"))
                ) and text[at + len(key) :]:
                    return len(key)
                at = text.find(key, at + 1)
    return 0


WORDS = st.lists(st.sampled_from(["foo", "bar", "x1", "(", ")", " ", "\n", "    ", "_y", "="]), max_size=30).map(
    "".join
)


@given(st.lists(WORDS, min_size=1, max_size=4), WORDS)
def test_index_finds_the_longest_match(texts, left):
    found = TextIndex(texts).find(left, key_starts(left), 4)
    assert max((hit.matched for hit in found), default=0) == naive(left, texts)
    for hit in found:
        assert any(left[len(left) - hit.matched :] + hit.text in text for text in texts)


@given(st.lists(WORDS, min_size=1, max_size=4), WORDS)
def test_scan_finds_the_longest_match(texts, left):
    found = scan_texts(left, texts, key_starts(left), 4)
    assert max((hit.matched for hit in found), default=0) == naive(left, texts)


def test_a_text_that_repeats_itself_is_looked_at_in_few_places():
    class Counted(str):
        looks = 0

        def rfind(self, *args):
            self.looks += 1
            return super().rfind(*args)

    text = Counted("A" * 20_000)
    assert scan_texts('data = "AAAA', [text], key_starts('data = "AAAA'), 4) == []
    assert text.looks < 2000


def test_a_word_cut_by_the_cursor_is_continued(codec):
    memory = Memory(codec, None)
    memory.note_chunks([("h.py", "def compute_total(items):\n    return sum(items)\n")])
    hints = memory.hints("x = 1\ntotal = compute_to", "\n", [1, 2, 3])()
    # The draft is encoded on its own: its first token is what the model writes next, not a piece of a longer token.
    # The drafter meets it behind the same tokens that stand left of the cursor.
    assert hints.context == (1, 2, 3, *codec.encode("tal(items):\n    return sum(items)\n"), 1, 2, 3)


def test_accepted_completions_are_read_with_every_request(codec):
    memory = Memory(codec, None, accepted_tokens=12)
    for i in range(9):
        memory.note_accepted(f"value_{i} = {i}\n")
    context = codec.decode(memory.hints("", "", [5, 6])().context)
    assert context.endswith("value_8 = 8\n" + codec.decode([5, 6]))
    assert "value_1" not in context


def test_the_clients_prediction_comes_first(codec):
    hints = Memory(codec, None).hints("x = ", "\n", [1], codec.encode("value + 1"))()
    assert codec.decode(hints.prediction) == "value + 1"


def test_the_last_suggestion_is_drafted_again_while_it_is_typed(codec):
    memory = Memory(codec, None)
    memory.note_answer("def add(a, b, c, d):\n    re", "turn a + b\n")
    assert codec.decode(memory.hints("def add(a, b, c, d):\n    retur", "", [1])().context[1:]).startswith("n a + b")


def test_a_suggestion_that_was_typed_counts_as_accepted(codec):
    memory = Memory(codec, None)
    memory.note_answer("def add(a, b):\n    ", "return a + b\n")
    memory.note_typed("def add(a, b):\n    return a")
    assert len(memory.accepted) == 0
    memory.note_typed("def add(a, b):\n    return a + b\n\n")
    assert memory.accepted.latest_first() == ["    return a + b\n"]


def test_texts_are_bounded_and_forgotten(codec):
    texts = RecentTexts(10)
    for i in range(5):
        texts.put(str(i), "abcd")
    assert texts.latest_first() == ["abcd", "abcd"]
    texts.put("big", "x" * 11)
    assert "big" not in texts
    memory = Memory(codec, None)
    memory.note_chunks([(None, "text of a chunk\n")])
    memory.hints("text of", "", [1])()
    memory.forget()
    assert len(memory.chunks) == 0
    hints = memory.hints("text of", "", [1])()
    assert hints.prediction == ()
    assert len(hints.session) == 0


def test_the_drafters_memory_reads_each_chunk_once(codec):
    memory = Memory(codec, None)
    for _ in range(3):
        memory.note_chunks([("a.py", "x = 1\n"), ("b.py", "y = 2\n")])
        memory.encode_new()
        session = memory.hints("", "", [1])().session
    assert len(session) == len(codec.encode("x = 1\n")) + len(codec.encode("y = 2\n"))


def test_the_drafters_memory_is_that_of_when_the_work_begins(codec):
    memory = Memory(codec, None)
    hints = memory.hints("x = ", "\n", [1, 2])
    memory.forget()
    assert hints().session is memory.hints("", "", [1])().session
