"""With the bundled model: who types never waits for a chat, and the chat says what it would have said alone."""

import itertools
import json
import threading

import httpx
import pytest
from waiting import wait_for

SOURCE = "".join(
    f"def area_{i}(width, height):\n    total = width * height + {i}\n    return total\n\n\n" for i in range(30)
)
INFILL = {"input_prefix": "import os\n\n\n", "input_suffix": "\n", "prompt": "def read_lines(path):", "n_predict": 16}
CHAT = {"messages": [{"role": "user", "content": SOURCE}], "max_tokens": 1000}


class Talk(threading.Thread):
    """A streamed chat; the events so far are `events`."""

    def __init__(self, server, **fields):
        super().__init__(daemon=True)
        self.server, self.fields, self.events, self.left = server, {**CHAT, **fields, "stream": True}, [], False
        self.start()

    def run(self):
        with httpx.stream("POST", self.server.url + "/v1/chat/completions", json=self.fields, timeout=300) as answer:
            for line in itertools.takewhile(lambda _: not self.left, answer.iter_lines()):
                self.events += [json.loads(line[6:])["choices"][0]] if line.startswith("data: {") else []

    @property
    def text(self):
        return "".join(choice["delta"].get("content", "") for choice in self.events)

    @property
    def over(self):
        return bool(self.events) and self.events[-1]["finish_reason"] is not None


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 5}])
def test_completions_are_served_in_the_middle_of_a_chat(reference_live, sampling):
    expected = reference_live.post("/infill", INFILL).json()["content"]
    talk = Talk(reference_live, **sampling)
    wait_for(lambda: len(talk.events) > 2)
    for i in range(3):
        answer = reference_live.post("/infill", {**INFILL, "cache_prompt": False}).json()
        assert answer["content"] == expected and expected
        assert "superseded" not in answer
        assert i or not talk.over, "the chat was over before anybody typed: nothing was tested"
    talk.join(300)
    assert talk.over
    # Asked for afterwards: what was said once is drafted whole, and such a chat is over at once.
    alone = reference_live.post("/v1/chat/completions", {**CHAT, **sampling}).json()["choices"][0]["message"]["content"]
    assert talk.text == alone


def test_chats_go_on_beside_one_another_and_behind_them_nobody_waits(reference_live):
    # One token a pass: such a chat takes longer than three prompts and a completion on any machine.
    talks = [
        Talk(reference_live, messages=[{"role": "user", "content": f"# {i}\n" + SOURCE}], speculative=False)
        for i in range(4)
    ]
    wait_for(lambda: all(len(talk.events) > 1 for talk in talks))
    assert not any(talk.over for talk in talks)
    answer = reference_live.post("/infill", INFILL).json()
    assert answer["content"] and "superseded" not in answer
    assert not any(talk.over for talk in talks)
    for talk in talks:
        talk.left = True
        talk.join(300)
        assert not talk.is_alive() and talk.text
    assert reference_live.post("/infill", INFILL).json()["content"] == answer["content"]
