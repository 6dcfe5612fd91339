import json
from dataclasses import replace

import pytest
import torch
from byte_tokenizers import byte_tokenizer
from dense_models import llama
from folders import write
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

import retrieve_spec as rs
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.edit import merge_datastores, retokenize_datastore
from retrieve_spec.datastore.fingerprint import load_tokenizer, tokenizer_fingerprint
from retrieve_spec.datastore.inspection import verify_datastore
from retrieve_spec.datastore.manifest import read_manifest, write_manifest
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import TokenizerMismatchError
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


def bpe(*pre, **options):
    """A tokenizer of characters and some pairs of them."""
    pieces = ["<unk>", *"abcdefgh ", "ab", "cd", "abcd", "d "]
    merges = [("a", "b"), ("c", "d"), ("ab", "cd"), ("d", " ")]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", **options)
    made = Tokenizer(model)
    if pre:
        made.pre_tokenizer = pre[0] if len(pre) == 1 else pre_tokenizers.Sequence(list(pre))
    return made


SPACES = pre_tokenizers.Split(" ", "isolated")
PARTS = [
    (lambda: bpe(SPACES), "pre_tokenizer"),
    (lambda: bpe(ignore_merges=True), "ignore_merges"),
    (lambda: bpe(byte_fallback=True), "byte_fallback"),
    (lambda: with_added(lstrip=True), "added_tokens"),
    (lambda: with_added(normalized=True), "added_tokens"),
    (lambda: unigram(-3.0), "vocab"),
]


def unigram(score):
    return Tokenizer(models.Unigram([("<unk>", 0.0), *((c, -1.0) for c in "abcd "), ("ab", score)], 0, False))


def with_added(**flags):
    made = bpe()
    made.add_tokens([AddedToken("abcd", **({"normalized": False} | flags))])
    return made


@pytest.mark.parametrize(("make", "part"), PARTS)
def test_a_store_is_refused_to_a_tokenizer_of_another_pipeline_which_is_named(make, part, tmp_path):
    (tmp_path / "a.txt").write_text("abcd ab cd " * 9)
    built = {"added_tokens": with_added, "vocab": lambda: unigram(-2.0)}.get(part, bpe)()
    build_datastore(tmp_path / "s", str(tmp_path / "a.txt"), built, workers=1)
    with pytest.raises(TokenizerMismatchError, match=rf"which differs in {part}\. .*retokenize"):
        open_datastore(tmp_path / "s", tokenizer=make())
    open_datastore(tmp_path / "s", tokenizer=built)


def test_pipelines_that_are_written_differently_are_equal(tmp_path):
    (tmp_path / "a.txt").write_text("abcd ab cd " * 9)
    build_datastore(tmp_path / "s", str(tmp_path / "a.txt"), bpe(SPACES), workers=1)
    nested = pre_tokenizers.Sequence([pre_tokenizers.Sequence([SPACES])])
    written = json.loads(bpe(nested).to_str())
    written["model"]["vocab"] = dict(reversed(written["model"]["vocab"].items()))
    del written["model"]["dropout"], written["model"]["ignore_merges"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    for tokenizer in (bpe(nested), tmp_path / "tokenizer.json"):
        assert open_datastore(tmp_path / "s", tokenizer=tokenizer).manifest.tokens


def test_a_store_whose_fingerprint_an_earlier_release_made_is_compared_by_its_tokenizer(tmp_path):
    write(tmp_path, {"a.txt": "ad cd ab " * 9, "b.txt": "cd ab"})
    older = tmp_path / "s"
    build_datastore(older, str(tmp_path / "a.txt"), bpe(), workers=1)
    write_manifest(older, replace(read_manifest(older), fingerprint="sha256:" + "0" * 64))
    open_datastore(older, tokenizer=bpe())
    open_datastore(older, tokenizer=tokenizer_fingerprint(bpe()))
    verify_datastore(older)
    assert add_documents(older, str(tmp_path / "b.txt")).documents == 1
    build_datastore(tmp_path / "new", str(tmp_path / "b.txt"), bpe(), workers=1)
    for number, stores in enumerate(([older, tmp_path / "new"], [tmp_path / "new", older])):
        assert merge_datastores(tmp_path / f"m{number}", stores).documents == 2


TEXT = "def f(a):<|chat|> return a<|chat|>" * 3


def test_text_in_tokens_that_the_model_does_not_embed_is_refused_until_it_is_converted(tmp_path):
    variant, base = byte_tokenizer(), byte_tokenizer()
    variant.add_special_tokens(["<|chat|>"])
    (tmp_path / "a.py").write_text(TEXT)
    build_datastore(tmp_path / "s", str(tmp_path / "a.py"), variant, workers=1)
    rs.accelerate(llama(257), datastores=[tmp_path / "s"], nodes=8)
    model = llama(256)
    with pytest.raises(TokenizerMismatchError, match="token 256"):
        rs.accelerate(model, datastores=[tmp_path / "s"], nodes=8)
    retokenize_datastore(tmp_path / "s", base, workers=1)
    rs.accelerate(model, datastores=[tmp_path / "s"], nodes=8)
    ids = torch.tensor([base.encode("def f(a):<|chat|> ret").ids])
    assert model.generate(ids, max_new_tokens=8, do_sample=False).shape[1] == ids.shape[1] + 8
