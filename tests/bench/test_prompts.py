"""Workloads: what ships, files of one's own, Spec-Bench's questions, and templates."""

import pytest

from retrieve_spec.bench import workloads
from retrieve_spec.bench.workloads import Prompt, read_prompts
from retrieve_spec.errors import TraceError
from retrieve_spec.reference_model import reference_path


def test_builtin_prompts_are_of_every_kind_and_fit_the_model():
    from tokenizers import Tokenizer

    prompts = read_prompts("builtin", 3)
    assert {prompt.task for prompt in prompts} == set(workloads.TASKS)
    assert len({prompt.name for prompt in prompts}) == len(prompts)
    assert prompts == read_prompts("builtin", 3)
    tokenizer = Tokenizer.from_file(str(reference_path() / "tokenizer.json"))
    assert all(len(tokenizer.encode(prompt.turns[0]).ids) + 160 < 2048 for prompt in prompts)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (
            "",
            '{"prompt": "a", "task": "t", "prediction": "p"}\n{"turns": ["x", "y"], "id": "q"}\n\n',
            [Prompt("1", "t", ("a",), "p"), Prompt("q", "other", ("x", "y"), raw=False)],
        ),
        (  # only a newline ends a line
            "",
            '{"prompt": "one\u2028two\u0085three"}\r\n{"prompt": "four"}\n',
            [Prompt("1", "other", ("one\u2028two\u0085three",)), Prompt("2", "other", ("four",))],
        ),
        (
            "spec-bench:",
            '{"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": []}',
            [Prompt("81", "writing", ("one", "two"), raw=False)],
        ),
    ],
)
def test_lines_with_prompts_and_turns(tmp_path, kind, text, expected):
    (tmp_path / "p.jsonl").write_bytes(text.encode())
    assert read_prompts(f"{kind}{tmp_path / 'p.jsonl'}") == expected
    assert read_prompts(f"{kind}{tmp_path / 'p.jsonl'}", 1) == expected[:1]


@pytest.mark.parametrize(
    "text",
    [
        *("", "no json", "[1]", '{"text": 1}', '{"turns": []}', '{"prompt": ""}', '{"prompt": "a", "prediction": 7}'),
        *('{"question_id": 1, "turns": "one"}', '{"question_id": 1, "turns": [1]}'),
        '{"prompt": "\\ud800"}',
        '{"prompt": "a", "id": "\\udfff"}',
    ],
)
def test_other_files_are_refused_with_the_line(tmp_path, text):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(TraceError, match=r"p\.jsonl") as refused:
        read_prompts(str(tmp_path / "p.jsonl"))
    assert text in str(refused.value).replace("\\\\", "\\")
