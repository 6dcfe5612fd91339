from __future__ import annotations

import json

import pytest
from byte_tokenizers import byte_tokenizer
from tokenizers import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture
def texts(tmp_path):
    """A folder of four small documents with much in common."""
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    for name, text in {
        "a.txt": "the cat sat on the mat. " * 3,
        "b.txt": "the cat ran to the mat and the cat ate.",
        "c.py": "def cat(mat):\n    return mat\n",
        "sub/d.txt": "the dog sat on the cat.",
    }.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "answers.jsonl"
    rows = [{"output": f"answer number {i} is {i * i}", "meta": {"text": f"nested {i}"}} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
