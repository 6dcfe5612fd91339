from __future__ import annotations

import json

import pytest
from byte_tokenizers import byte_tokenizer
from tokenizers import Tokenizer, normalizers

from retrieve_spec.datastore.fingerprint import load_tokenizer, tokenizer_fingerprint
from retrieve_spec.errors import BuildError
from retrieve_spec.reference_model import reference_path


def test_same_from_object_file_folder_and_name(reference_tokenizer):
    folder = reference_path()
    expected = tokenizer_fingerprint(reference_tokenizer)
    assert expected.startswith("sha256:")
    for given in ("reference", folder, str(folder / "tokenizer.json"), load_tokenizer("reference"), expected):
        assert tokenizer_fingerprint(given) == expected


def test_what_changes_it(tmp_path):
    plain = byte_tokenizer()
    seen = {tokenizer_fingerprint(plain)}

    chat = byte_tokenizer()
    chat.add_special_tokens(["<|user|>"])
    chat.enable_truncation(5)
    assert tokenizer_fingerprint(chat) in seen  # added tokens and truncation do not count

    lower = byte_tokenizer()
    lower.normalizer = normalizers.Lowercase()
    merged = json.loads(plain.to_str())
    merged["model"]["vocab"]["th"] = 256
    merged["model"]["merges"] = [["t", "h"]]
    for other in (lower, Tokenizer.from_str(json.dumps(merged)), byte_tokenizer(offset=1), byte_tokenizer(pad=1)):
        fingerprint = tokenizer_fingerprint(other)
        assert fingerprint not in seen
        seen.add(fingerprint)


@pytest.mark.parametrize("given", [None, 5, object()])
def test_no_tokenizer(given):
    with pytest.raises(BuildError, match="tokenizer"):
        tokenizer_fingerprint(given)


def test_no_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BuildError, match=r"tokenizer\.json"):
            tokenizer_fingerprint(path)
