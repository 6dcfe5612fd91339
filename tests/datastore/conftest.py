from __future__ import annotations

import json

import pytest
from hypothesis import settings
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

settings.register_profile("compiled", deadline=None)  # the first example compiles
settings.load_profile("compiled")


def byte_tokenizer(offset: int = 0, pad: int = 0) -> Tokenizer:
    """One token per byte; ids start at `offset`, and `pad` unused ids follow."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i + offset for i, piece in enumerate(alphabet)}
    vocabulary |= {f"<unused{i}>": offset + len(alphabet) + i for i in range(pad)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevel()
    return tokenizer


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
