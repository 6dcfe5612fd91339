import json

import numpy as np
import pytest
from scripted_drafter import ScriptedDrafter
from tokenizers import processors

from retrieve_spec.bench.replay import Replay, TraceRow, read_trace, replay_trace
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.errors import TraceError


def words(numbers):
    return " ".join(map(str, numbers))


@pytest.fixture
def trace(tmp_path):
    """Writes rows (or raw lines) to a file."""

    def write(*rows):
        path = tmp_path / "trace.jsonl"
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write


def ids(*values):
    return np.array(values, np.int32)


def test_counts_are_exact():
    row = TraceRow("edit", ids(1, 2), [(ids(3, 4, 5, 6), True), (ids(50, 51), False), (ids(7, 8, 9), True)])
    drafter, told = ScriptedDrafter([1, 2, 3, 4, 5, 6, 50, 51, 7, 8, 9], "half", length=3), []
    drafter.feed = lambda tokens: drafter.text.extend(tokens.tolist())
    result = Replay(drafter, 10).run([row], lambda tokens, passes: told.append((tokens, passes)))
    # 3 (wrong) 4 | 5 6 | fed | 7 8 9
    assert [verified.emitted.tolist() for verified in drafter.seen] == [[3, 4], [5, 6], [7, 8, 9]]
    assert [verified.path.tolist() for verified in drafter.seen] == [[0], [0, 1], [0, 1, 2]]
    assert [(budget.max_nodes, budget.max_depth) for budget in drafter.budgets] == [(10, 4), (10, 2), (10, 3)]
    assert (drafter.started, drafter.finished) == (1, 1)
    assert result["passes"] == 3 and result["tokens"] == 7
    assert result["tokens_per_pass"] == pytest.approx(7 / 3)
    assert result["nodes_per_pass"] == pytest.approx((3 + 2 + 3) / 3)
    assert result["expected_tokens_per_pass"] == pytest.approx(1 + (3 + 2 + 3) / 3)
    assert result["accepted_by_source"] == {"script": 6}
    assert result["by_task"] == {"edit": {"tokens_per_pass": pytest.approx(7 / 3), "passes": 3, "tokens": 7}}
    assert set(result["propose_us"]) == set(result["observe_us"]) == {"p50", "p99"}
    assert told == [(7, 3)]


def test_rows_are_read_as_documented(trace, numbers):
    numbers.post_processor = processors.TemplateProcessing(single="7 $A", special_tokens=[("7", 7)])
    path = trace(
        {"prompt": "1 2", "output": "3", "task": "a", "extra": 1},
        {"prompt": "1", "output": "2", "meta": {"loop": True}},
        {"prompt": "4", "output": "5", "more": [["6 8", "9"], ["10", ""]], "meta": {"loop": False}},
        {"prompt": "", "output": "", "task": None, "meta": None, "more": None},
    )
    rows = list(read_trace(path, numbers))
    assert [row.task for row in rows] == ["a", "", ""]
    assert [row.prompt.tolist() for row in rows] == [[7, 1, 2], [7, 4], [7]], "special tokens before prompts alone"
    assert [(part.tolist(), own) for part, own in rows[1].segments] == [
        ([5], True),
        ([6, 8], False),
        ([9], True),
        ([10], False),
        ([], True),
    ]
    assert rows[0].prompt.dtype == np.int32
    assert len(list(read_trace(path, numbers, limit=2))) == 1, "rows that are left out count"
    assert len(list(read_trace(path, numbers, limit=3))) == 2


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"3",
        b'{"prompt": "1"}',
        b'{"prompt": "1", "output": 3}',
        b'{"prompt": null, "output": "3"}',
        b'{"prompt": "1", "output": "2", "more": [["1"]]}',
        b'{"prompt": "1", "output": "2", "more": ["123"]}',
        b'{"prompt": "1", "output": "2", "more": [[1, 2]]}',
        b'{"prompt": "1", "output": "2", "more": 5}',
        b'{"prompt": "1", "output": "2", "meta": "loop"}',
        b'{"prompt": "1", "output": "2", "task": [1]}',
        b'{"prompt": "1", "output": "\xff\xfe"}',
        b'{"prompt": "1", "output": "\\ud800"}',
        b"\xff\xfe\x00",
        b"",
    ],
)
def test_a_bad_line_is_named(trace, numbers, line):
    good = {"prompt": "1", "output": "2"}
    path = trace(good, line, good)
    rows = read_trace(path, numbers)
    assert next(rows).prompt.tolist() == [1]
    with pytest.raises(TraceError, match=r"line 2 of .*trace\.jsonl"):
        next(rows)
    assert len(list(read_trace(path, numbers, limit=1))) == 1, "what is not read is not judged"


@pytest.fixture
def answers(trace, numbers, tmp_path):
    """A trace whose answers repeat from row to row, and the tokenizer's file."""
    numbers.save(str(tmp_path / "tokenizer.json"))
    answer = words(range(100, 140))
    path = trace(
        {"prompt": "1 2 3", "output": answer, "task": "b"},
        {"prompt": "4 5 6", "output": answer, "task": "a"},
        {"prompt": "7", "output": answer, "meta": {"loop": True}},
        {"prompt": "8 9", "output": "10 11", "more": [[words(range(300, 340)), words(range(300, 330))]], "task": "b"},
    )
    return path, tmp_path / "tokenizer.json"


def test_a_session_is_remembered_only_when_asked_for(answers):
    path, tokenizer = answers
    without = replay_trace(path, tokenizer)
    kept = replay_trace(path, tokenizer, SpeculationConfig(session=True))
    assert without["tokens"] == kept["tokens"] == 40 + 40 + 32
    assert without["by_task"]["a"]["passes"] >= 39, "nothing of the first row is in the second"
    assert kept["by_task"]["a"]["passes"] < 15
    assert kept["accepted_by_source"]["session"] > 25
    assert "session" not in without["accepted_by_source"]
    assert without["by_task"]["b"]["passes"] <= 2 + 40 + 8, "fed text is drafted from"
