"""Sources that are no text of this machine: tokenised files of datatrove, and files at addresses."""

from __future__ import annotations

import gzip
import hashlib
import struct

import fsspec
import pytest
from byte_tokenizers import byte_tokenizer
from test_build import contents
from tokenizers import AddedToken

from retrieve_spec.datastore import shards
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.entry_filter import Reason
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.verify import verify_datastore
from retrieve_spec.datastore.work import WorkFolder
from retrieve_spec.errors import BuildError, TokenizerMismatchError

TEXTS = ["the cat sat on the mat", "", "Grüße, Welt", "a third text that is somewhat longer than the others"]
TOKENS = sum(len(text.encode()) for text in TEXTS)


@pytest.fixture
def tokenizer():
    made = byte_tokenizer()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    return made


@pytest.fixture
def model(tokenizer, tmp_path):
    (tmp_path / "tiny").mkdir()
    tokenizer.save(str(tmp_path / "tiny" / "tokenizer.json"))
    return tmp_path / "tiny"


def write(path, documents, name, width=2, end=()):
    """What datatrove's `TokenizedFile` writes, with the numbers of the end-of-text token behind every document."""
    ids = [[*document, *end] for document in documents]
    flat = [number for document in ids for number in document]
    path.write_bytes(struct.pack(f"<{len(flat)}{'HI'[width == 4]}", *flat))
    ends = [sum(map(len, ids[: i + 1])) for i in range(len(ids))]
    path.with_name(path.name + ".index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    path.with_name(path.name + ".metadata").write_text(f"{name}|{width}\n{len(flat)}\n{len(flat)} T")
    return path


@pytest.fixture
def encoded(tokenizer):
    return [tokenizer.encode(text).ids for text in TEXTS]


@pytest.mark.parametrize("width", [2, 4])
def test_documents_are_those_of_the_text(width, encoded, tokenizer, model, tmp_path, monkeypatch):
    end = [tokenizer.token_to_id("<|end|>")]
    path = write(tmp_path / "part.ds", encoded, model / "tokenizer.json", width, end)
    monkeypatch.setattr(shards, "SHARD_BYTES", 30 * width)  # several shards
    report = build_datastore(tmp_path / "s", str(path), str(model))
    assert report.skipped_by_reason == {"empty": 1}
    assert contents(tmp_path / "s") == {f"part.ds#{i}": text for i, text in enumerate(TEXTS, 1) if text}
    hashes = {d.path: d.sha256 for d in open_datastore(tmp_path / "s").documents()}
    assert hashes["part.ds#3"] == hashlib.sha256(TEXTS[2].encode()).hexdigest()
    verify_datastore(tmp_path / "s")
    (tmp_path / "same.txt").write_text(TEXTS[0])
    report = add_documents(tmp_path / "s", [str(tmp_path / "same.txt"), str(path)])
    assert (report.documents, report.skipped_by_reason["duplicate"]) == (0, 4)


def test_in_a_folder_the_files_beside_one_are_no_documents(encoded, tokenizer, model, tmp_path):
    folder = tmp_path / "f"
    folder.mkdir()
    write(folder / "a.ds", encoded[:1], model)
    (folder / "a.ds.loss").write_bytes(b"\1" * 40)
    (folder / "b.ds").write_text("no such file: it has no index")
    (folder / "b.ds.index.txt").write_text("a text")
    build_datastore(tmp_path / "s", str(folder), tokenizer)
    assert set(contents(tmp_path / "s")) == {"a.ds#1", "b.ds", "b.ds.index.txt"}


@pytest.mark.parametrize("cut", [False, True])
def test_secrets_in_tokenised_text_stay_out(cut, tokenizer, model, tmp_path):
    secret = tokenizer.encode("key = 'hf_" + "aB3" * 12 + "'").ids
    if cut:  # by a special token inside
        secret[20:20] = [tokenizer.token_to_id("<|end|>")]
    path = write(tmp_path / "a.ds", [secret, tokenizer.encode("plain").ids], model)
    report = build_datastore(tmp_path / "s", str(path), str(model))
    assert report.skipped_by_reason == {"holds a key or token": 1}


def test_ids_of_another_tokenizer_are_refused(encoded, tokenizer, model, tmp_path):
    byte_tokenizer(offset=7).save(str(tmp_path / "other.json"))
    path = write(tmp_path / "a.ds", encoded, tmp_path / "other.json")
    with pytest.raises(TokenizerMismatchError, match=r"other\.json"):
        build_datastore(tmp_path / "s", str(path), str(model))
    for name, given, fits in (
        ("org/tiny", str(model), True),  # by its last part: nothing is fetched
        ("org/large", str(model), False),
        ("Unknown Tokenizer|2", str(model), False),
        ("org/tiny", tokenizer, False),  # an object without a name
        (str(model), tokenizer, True),
    ):
        write(path, encoded, name)
        if fits:
            build_datastore(tmp_path / f"s{len(list(tmp_path.iterdir()))}", str(path), given)
        else:
            with pytest.raises(TokenizerMismatchError, match=r"a\.ds\.metadata"):
                build_datastore(tmp_path / "never", str(path), given)
    assert not (tmp_path / "never").exists()


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda ds, index, meta: index.unlink(), r"a\.ds\.index"),
        (lambda ds, index, meta: meta.unlink(), r"a\.ds\.metadata"),
        (lambda ds, index, meta: cut(ds, 20), "20 bytes"),
        (lambda ds, index, meta: cut(index, 11), "index of 11 bytes"),
        (lambda ds, index, meta: meta.write_text(meta.read_text().replace("|2", "|3")), "2 or 4 bytes"),
        (lambda ds, index, meta: meta.write_text(meta.read_text().replace("|2", "|4")), "tokens of 4 bytes"),
        (lambda ds, index, meta: meta.write_text(meta.read_text().replace("\n", "\n1")), "as the index says"),
        (lambda ds, index, meta: index.write_bytes(struct.pack("<4Q", 9, 3, 30, ds.stat().st_size // 2)), "rise"),
        (lambda ds, index, meta: ds.write_bytes(b"\xff" * ds.stat().st_size), "token ids below"),
        (lambda ds, index, meta: meta.write_bytes(b""), "a tokenizer that is not named"),
    ],
)
def test_damaged_files_are_errors_that_name_them(damage, said, encoded, model, tmp_path):
    path = write(tmp_path / "a.ds", encoded, model)
    damage(path, tmp_path / "a.ds.index", tmp_path / "a.ds.metadata")
    with pytest.raises((BuildError, TokenizerMismatchError), match=said):
        build_datastore(tmp_path / "s", str(path), str(model))
    assert not (tmp_path / "s" / "manifest.json").exists()


def test_sources_at_an_address(encoded, model, tmp_path, url):
    """Files of an object store, by the same filter and with the same bytes as those of a folder."""
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    write(folder / "a.ds", encoded, model)
    (folder / "sub" / "b.txt").write_text("another text")
    (folder / "r.jsonl").write_text('{"text": "one record"}\n{"text": "and one more"}\n')
    (folder / ".env").write_text("PASSWORD=hunter2hunter2")
    (folder / "x.min.js").write_text("var a")
    (folder / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    fs, root = fsspec.core.url_to_fs(url)
    fs.put(str(folder), root, recursive=True)
    here = build_datastore(tmp_path / "here", str(folder), str(model))
    there = build_datastore(tmp_path / "there", f"{url}/", str(model))
    assert there.skipped_by_reason == here.skipped_by_reason
    names = [entry.name for entry in read_manifest(tmp_path / "here").segments]
    assert [entry.name for entry in read_manifest(tmp_path / "there").segments] == names
    one = build_datastore(tmp_path / "one", f"{url}/sub/b.txt", str(model))
    assert (one.documents, list(contents(tmp_path / "one"))) == (1, ["b.txt"])
    with pytest.raises(BuildError, match="nothing there"):
        build_datastore(tmp_path / "none", f"{url}-none", str(model))


@pytest.mark.parametrize("name", ["a.txt", "r.jsonl"])
def test_a_remote_that_breaks_ends_the_build(name, tokenizer, tmp_path, monkeypatch):
    """Its files are not counted as unreadable: they are sound, and somebody should try again."""
    memory = fsspec.filesystem("memory")
    original = type(memory).open

    def broken(self, path, *rest, **named):
        if path.endswith(name):
            raise OSError("the line is dead")
        return original(self, path, *rest, **named)

    try:
        memory.pipe({"/data/r.jsonl": b'{"text": "one record"}\n', "/data/a.txt": b"a text"})
        with monkeypatch.context() as patch:
            patch.setattr(type(memory), "open", broken)
            with pytest.raises(BuildError, match=f"could not reach memory:.*{name}: the line is dead"):
                build_datastore(tmp_path / "s", "memory://data", tokenizer)
        build_datastore(tmp_path / "s", resume=True)
        assert set(contents(tmp_path / "s")) == {"r.jsonl#1", "a.txt"}
    finally:
        memory.rm("/", recursive=True)


def planned_then(damage, sources, tokenizer, store, monkeypatch):
    """Report of a build whose sources are damaged once it has planned what to read."""
    original = WorkFolder.begin

    def begin(self, plan, inputs=()):
        plan = original(self, plan, inputs)
        damage()
        return plan

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "begin", begin)
        report = build_datastore(store, sources, tokenizer, workers=1)
    verify_datastore(store)
    return report


@pytest.mark.parametrize(
    ("damage", "reason", "kept"),
    [
        (lambda ds: ds.unlink(), Reason.GONE, set()),
        (lambda ds: ds.with_name("a.ds.index").unlink(), Reason.CHANGING, set()),
        (lambda ds: ds.with_name("a.ds.metadata").unlink(), Reason.CHANGING, set()),
        (lambda ds: cut(ds, 20), Reason.CHANGING, set()),
        (lambda ds: cut(ds.with_name("a.ds.index"), 11), Reason.CHANGING, set()),
        (lambda ds: ds.with_name("a.ds.metadata").write_text("other/tokenizer|2\n"), Reason.CHANGING, set()),
        (
            lambda ds: ds.with_name("a.ds.index").write_bytes(struct.pack("<4Q", 9, 3, 30, TOKENS)),
            Reason.CHANGING,
            {"a.ds#1"},
        ),
        (lambda ds: write(ds, [[97], [98]], "tiny"), Reason.CHANGING, set()),
    ],
)
@pytest.mark.parametrize("pieces", [False, True])
def test_what_changes_once_planned_is_counted(
    damage, reason, kept, pieces, encoded, tokenizer, model, tmp_path, monkeypatch
):
    folder = tmp_path / "f"
    folder.mkdir()
    assert sum(map(len, encoded)) == TOKENS
    path = write(folder / "a.ds", encoded, model)
    (folder / "b.txt").write_text("a text that stays")
    if pieces:
        monkeypatch.setattr(shards, "SHARD_BYTES", 60)
    report = planned_then(lambda: damage(path), str(folder), tokenizer, tmp_path / "s", monkeypatch)
    found = set(contents(tmp_path / "s"))
    assert found >= {"b.txt"} | kept and (pieces or found == {"b.txt"} | kept)
    assert set(report.skipped_by_reason) == {str(reason)}


@pytest.mark.parametrize("name", ["a.ds", "a.jsonl", "a.txt", "a.txt.gz"])
def test_what_vanishes_once_planned_is_gone(name, encoded, tokenizer, model, tmp_path, url, monkeypatch):
    """Here as at an address."""
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "a.ds", encoded, model)
    (folder / "a.jsonl").write_text('{"text": "one record"}\n')
    (folder / "a.txt").write_text("another text")
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"and one more"))
    fs, root = fsspec.core.url_to_fs(url)
    fs.put(str(folder), root, recursive=True)
    for source, vanish in ((str(folder), (folder / name).unlink), (url, lambda: fs.rm_file(f"{root}/{name}"))):
        store = tmp_path / f"s{len(list(tmp_path.iterdir()))}"
        report = planned_then(vanish, source, str(model), store, monkeypatch)
        assert report.skipped_by_reason.get("gone") == 1
        assert report.documents == (3 if name == "a.ds" else 5)
