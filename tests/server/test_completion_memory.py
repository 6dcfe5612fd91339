from __future__ import annotations

from retrieve_spec.server.memory import Memory


def test_the_clients_prediction_comes_first(codec):
    hints = Memory(codec).hints([1], codec.encode("value + 1"))()
    assert codec.decode(hints.prediction) == "value + 1" and hints.context == (1,)


def test_each_text_is_read_once_and_forgotten(codec):
    memory = Memory(codec)
    for version in range(3):
        memory.note_chunks(["x = 1\n", "y = 2\n"])
        memory.note_buffer("a.py", f"z = {version}\r\n")
        memory.encode_new()
        session = memory.hints([1])().session
    assert len(session) == sum(len(codec.encode(text)) for text in ("x = 1\n", "y = 2\n", "z = 0\n"))
    memory.note_chunks(["never = 'read'\n"])
    memory.forget()
    memory.encode_new()
    assert len(memory.hints([1])().session) == 0 and set(memory.contents().values()) == {0}


def test_the_drafters_memory_is_that_of_when_the_work_begins(codec):
    memory = Memory(codec)
    hints = memory.hints([1, 2])
    memory.forget()
    assert hints().session is memory.hints([1])().session
