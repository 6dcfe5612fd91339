"""Edit predictions: the excerpt that is to be edited is drafted, and a newer request replaces an older one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import wait_for

from retrieve_spec.server.edits import find_edit

EXCERPT = "def add(first, b):\n    return a + b\n"
CURSOR = EXCERPT.index(", b")
HISTORY = 'User edited "sums.py":\n```diff\n-def add(a, b):\n+def add(first, b):\n```\n'


def marked(cursor):
    return EXCERPT[:CURSOR] + cursor + EXCERPT[CURSOR:]


PROMPTS = {
    "zeta": (
        f"### Instruction:\nRewrite the excerpt.\n\n### User Edits:\n\n{HISTORY}\n### User Excerpt:\n\n```sums.py\n"
        f"<|start_of_file|>\n<|editable_region_start|>\n{marked('<|user_cursor_is_here|>')}<|editable_region_end|>\n"
        "print(add(1, 2))\n```\n\n### Response:\n",
        f"<|editable_region_start|>\n{EXCERPT}",
    ),
    "zeta2": (
        f"<[fim-suffix]>\nprint(add(1, 2))\n<[fim-prefix]><filename>edit_history\n{HISTORY}<filename>sums.py\n"
        f"<<<<<<< CURRENT\n{marked('<|user_cursor|>')}=======\n",
        EXCERPT,
    ),
    "zeta2.1": (
        f"<[fim-suffix]>\nprint(add(1, 2))\n<[fim-prefix]><filename>edit_history\n{HISTORY}<filename>sums.py\n"
        f"<|marker_1|>\nimport math\n<|marker_2|>\n{marked('<|user_cursor|>')}<|marker_3|>\n",
        f"<|marker_1|>\nimport math\n<|marker_2|>\n{EXCERPT}",
    ),
    "sweep": (
        f"<|file_sep|>sums.py.diff\noriginal:\na, b\nupdated:\nfirst, b\n<|file_sep|>original/sums.py\n"
        f"def add(a, b):\n    return a + b\n\n<|file_sep|>current/sums.py\n{EXCERPT}<|file_sep|>updated/sums.py\n",
        EXCERPT,
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_the_excerpt_is_drafted(live, say, codec, name):
    prompt, expected = PROMPTS[name]
    server = live(say("said"))
    messages = [{"role": "system", "content": "You edit code."}, {"role": "user", "content": prompt}]
    for path, body in (
        ("/v1/completions", {"prompt": prompt, "max_tokens": 40}),
        ("/completion", {"prompt": prompt}),
        ("/v1/chat/completions", {"messages": messages}),
    ):
        assert server.post(path, body).status_code == 200
        assert codec.decode(server.backend.hints[-1].prediction) == expected
        own = {**body, "prediction": {"type": "content", "content": "own"}}
        server.post(path, own)
        assert codec.decode(server.backend.hints[-1].prediction) == "own"


def test_what_asks_for_no_edit_has_none():
    assert find_edit("Explain <|editable_region_start|>.") is None
    assert find_edit("=======\nTitle\n<<<<<<< CURRENT\nx") is None
    assert find_edit("<|file_sep|>updated/a <|file_sep|>current/a\n") is None


def test_a_newer_edit_of_the_place_replaces_an_older(live, say):
    server = live(say("done"))
    server.backend.gate, queue = threading.Semaphore(0), server.service.queue
    with ThreadPoolExecutor() as threads:
        asked = []
        for typed in ("fir", "firs", "first"):
            body = {"prompt": PROMPTS["zeta"][0].replace("first", typed), "max_tokens": 9}
            asked.append(threads.submit(server.post, "/v1/completions", body))
            wait_for(lambda: len(server.done) + queue.queue_length + queue.begun >= len(asked))
        server.backend.gate.release(1000)
        assert [answer.result().status_code for answer in asked] == [499, 499, 200]
