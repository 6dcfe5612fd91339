"""With the bundled model: who types never waits for a chat, and the chat says what it would have said alone."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from waiting import HANG_S, wait_for

SOURCE = "".join(
    f"def area_{i}(width, height):\n    total = width * height + {i}\n    return total\n\n\n" for i in range(30)
)
INFILL = {"input_prefix": "import os\n\n\n", "input_suffix": "\n", "prompt": "def read_lines(path):", "n_predict": 16}
CHAT = {"messages": [{"role": "user", "content": SOURCE}], "max_tokens": 1000}


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 5}])
def test_completions_are_served_in_the_middle_of_a_chat(reference_live, sampling):
    expected, told = reference_live.post("/infill", INFILL).json()["content"], []
    chat = {**CHAT, **sampling}

    def talk():
        url = reference_live.url + "/v1/chat/completions"
        with httpx.stream("POST", url, json={**chat, "stream": True}, timeout=HANG_S) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    told.append(json.loads(line[6:])["choices"][0])

    with ThreadPoolExecutor() as threads:
        talking = threads.submit(talk)
        wait_for(lambda: len(told) > 2)
        for i in range(3):
            answer = reference_live.post("/infill", {**INFILL, "cache_prompt": False}).json()
            assert answer["content"] == expected and expected
            assert "superseded" not in answer
            assert i or not talking.done(), "the chat was over before anybody typed: nothing was tested"
    assert told[-1]["finish_reason"]
    # Asked for afterwards: what was said once is drafted whole, and such a chat is over at once.
    alone = reference_live.post("/v1/chat/completions", chat).json()["choices"][0]["message"]["content"]
    assert "".join(choice["delta"].get("content", "") for choice in told) == alone
