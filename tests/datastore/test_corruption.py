"""Stores whose bytes changed: found by their checksums, behind these by their structure; reading them does no harm.

Of dense indexes an error says so before FAISS reads them, and no place is outside of the text.
"""

import errno
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import faiss
import numpy as np
import pytest
from dense_models import save_model
from folders import flip, write

from retrieve_spec.config import DenseConfig, SpeculationConfig, StoreConfig
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.dense import DENSE_FILES, INDEX, POSITIONS
from retrieve_spec.datastore.edit import compact_datastore, merge_datastores, remove_documents, retokenize_datastore
from retrieve_spec.datastore.files import FileEntry, write_files
from retrieve_spec.datastore.inspection import search_datastore, verify_datastore
from retrieve_spec.datastore.manifest import MANIFEST, _checksum, content_name
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.presets import build_drafter
from retrieve_spec.errors import StoreCorruptError, StoreError, StoreVersionError
from retrieve_spec.kernels.source_table import ORIGIN_BITS
from retrieve_spec.sources.dense import DenseIndexes, DenseSource

ARRAYS = (
    "tokens",
    "suffix_array",
    "top",
    "vocabulary",
    "documents",
    "ngram_slots",
    "ngram_succ_tokens",
    "ngram_succ_counts",
)
PRESETS = ("auto", "rest", "sam", "hierarchy", "adaptive-trigram")


@pytest.fixture
def grown(store, records):
    add_documents(store, Source(str(records), field="output"))
    remove_documents(store, ["b.txt"])
    verify_datastore(store)
    return store


def files_of(store):
    return [p for p in sorted(store.rglob("*")) if p.is_file() and p.name != "lock" and p.stat().st_size]


def test_one_flipped_byte_anywhere_is_found(grown):
    random = np.random.default_rng(0)
    for path in files_of(grown):
        for at in (0, 0.5, 1, *random.random(12).tolist()):
            whole = flip(path, at)
            try:
                verify_datastore(grown)
                found = False
            except StoreError as error:
                found = bool(error.expected and error.got and error.remedy)
            path.write_bytes(whole)
            assert found, (path, at)
    verify_datastore(grown)


def test_truncated_and_missing_files_are_found_by_opening(grown):
    for path in files_of(grown):
        whole = path.read_bytes()
        path.unlink()
        with pytest.raises(StoreError):
            open_datastore(grown)
        path.write_bytes(whole[:-1])
        with pytest.raises(StoreCorruptError, match=r"expected .* got"):
            open_datastore(grown)
        path.write_bytes(whole)
    verify_datastore(grown)


def rewrite(store, change):
    """Alter the manifest, and make its checksum and the names of segments right again."""
    body = json.loads((store / MANIFEST).read_text())
    body.pop("checksum")
    change(body)
    for segment in body["segments"]:
        name = content_name({name: FileEntry(**file) for name, file in segment["files"].items()})
        (store / "segments" / segment["name"]).rename(store / "segments" / name)
        segment["name"] = name
    (store / MANIFEST).write_text(json.dumps({**body, "checksum": _checksum(body)}))


@pytest.mark.parametrize(("version", "remedy"), [(99, "Upgrade"), (2, "build the store again")])
def test_other_formats_are_refused(grown, version, remedy):
    rewrite(grown, lambda body: body.update(format=version))
    with pytest.raises(StoreVersionError, match=remedy):
        open_datastore(grown)


@pytest.mark.parametrize("dtype", ["<u1", "<f8", "O", "nonsense", ""])
def test_arrays_of_another_dtype_are_found_by_opening(grown, dtype):
    kept = (grown / MANIFEST).read_bytes()
    for segment in json.loads(kept)["segments"]:
        for kind in ("files", "tombstones"):
            for name in segment[kind]:

                def change(body, kind=kind, name=name):
                    for one in body["segments"]:
                        if name in one[kind]:
                            one[kind][name]["dtype"] = dtype

                copy = shutil.copytree(grown, grown.with_name("copy"))
                rewrite(copy, change)
                with pytest.raises(StoreCorruptError):
                    open_datastore(copy)
                shutil.rmtree(copy)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"format": "1"}', b"\xff\xfe"])
def test_nonsense_manifest_is_refused(grown, content):
    (grown / MANIFEST).write_bytes(content)
    with pytest.raises(StoreCorruptError):
        open_datastore(grown)


def forge(store, name, change):
    """Alter an array and record the checksum of what is there now: only its structure can tell."""
    folder = sorted((store / "segments").iterdir())[-1]
    path = folder / name

    def record(body):
        (entry,) = [s for s in body["segments"] if s["name"] == folder.name]
        array = np.fromfile(path, entry["files"][path.name]["dtype"])
        changed = change(array)
        path.unlink()  # may be shared by a hard link
        written = write_files(folder, {path.name: array if changed is None else changed})[path.name]
        entry["files"][path.name].update(bytes=written.bytes, sha256=written.sha256)

    rewrite(store, record)


def swap(array):
    array[[3, 8]] = array[[8, 3]]


def repeat(array):
    array[3] = array[8]


def more(column):
    def add_one(array):
        array[column::4][array[::4] != 0] += 1

    return add_one


def beyond(array):
    array[-1] = np.iinfo(array.dtype).max


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("suffix_array", swap),
        ("suffix_array", repeat),
        ("suffix_array", beyond),
        ("suffix_array", lambda array: array[:-1]),
        ("tokens", lambda array: np.roll(array, 1)),
        ("tokens", lambda array: np.where(array > 0, array ^ 3, 0).astype(array.dtype)),
        ("top", lambda array: array + np.uint64(1)),
        ("vocabulary", swap),
        ("vocabulary", beyond),
        ("documents", lambda array: np.append(array[:1], array)),
        ("ngram_slots", beyond),
        ("ngram_slots", swap),
        ("ngram_succ_tokens", beyond),
        ("ngram_succ_counts", lambda array: array[:-1]),
        ("ngram_slots", lambda array: array + np.uint32(1)),
        ("ngram_slots", lambda array: array[:-1]),
        ("ngram_slots", more(1)),  # of a context: how often it was continued
        ("ngram_slots", more(3)),  # by how many different tokens
        ("ngram_succ_counts", lambda array: array + np.uint32(1)),
        ("ngram_succ_tokens", lambda array: np.roll(array, 1)),
    ],
)
def test_wrong_structure_with_right_checksums_is_found(grown, name, change):
    forge(grown, f"{name}.bin", change)
    with pytest.raises(StoreCorruptError):
        verify_datastore(grown)


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("top", lambda array: array[:-1]),
        ("top", lambda array: np.append(array, array[-1:])),
        ("suffix_array", lambda array: array[:0]),
        ("tokens", lambda array: array[:0]),
    ],
)
def test_sizes_that_do_not_belong_together_are_found_by_opening(store, name, change, removed):
    if removed:
        remove_documents(store, ["b.txt"])
        assert any(segment.removed for segment in open_datastore(store).segments)
    forge(store, f"{name}.bin", change)
    for read in (open_datastore, verify_datastore):
        with pytest.raises(StoreCorruptError):
            read(store)


def test_a_text_whose_index_the_manifest_leaves_out_is_found(store):
    rewrite(store, lambda body: [body["segments"][0]["files"].pop(f"{name}.bin") for name in ("suffix_array", "top")])
    with pytest.raises(StoreCorruptError, match="an exact index of its text"):
        verify_datastore(store)


def test_tombstones_of_a_kind_that_is_not_known_are_refused(grown):
    def rename(body):
        (segment,) = [s for s in body["segments"] if s["tombstones"]]
        (path,) = (grown / "tombstones").glob("*-ranks.bin")
        other = path.rename(path.with_name(path.name.replace("ranks", "other")))
        segment["tombstones"][other.name] = segment["tombstones"].pop(path.name)

    rewrite(grown, rename)
    for read in (open_datastore, verify_datastore):
        with pytest.raises(StoreCorruptError):
            read(grown)


def test_document_tables_of_another_store_are_found(grown, tokenizer, records, tmp_path):
    build_datastore(tmp_path / "t", Source(str(records), field="output"), tokenizer)
    (other,) = (tmp_path / "t" / "segments").iterdir()
    for mine in (grown / "segments").iterdir():
        for path in other.glob("document_*.bin"):
            shutil.copy(path, mine / path.name)
    with pytest.raises(StoreCorruptError):
        open_datastore(grown)


def damage(store, name, content):
    (path,) = store.glob(f"segments/*/{name}.bin")
    size = path.stat().st_size
    path.write_bytes((content * (size // len(content) + 1))[:size])


def draft(store, preset, ids):
    """Draft along a text that the store knows; every token must be one of the vocabulary, every origin a place."""
    drafter = build_drafter(SpeculationConfig(draft=preset), datastores=[store])
    drafter.start(ids[:20])
    for at in range(20, 40, 2):
        tree = drafter.propose(Budget(16, 16))
        assert (tree.token_ids < store.manifest.vocabulary).all()
        for origin in tree.origin[tree.origin >= 0].tolist():
            store.document_at(origin >> ORIGIN_BITS, origin & ((1 << ORIGIN_BITS) - 1))
        drafter.observe(VerifiedPass(tree, np.empty(0, np.int32), ids[at : at + 2]))


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("seed", [0, 1, None])
def test_reading_a_damaged_array_ends_with_a_draft_or_an_error_that_says_so(store, tokenizer, name, seed):
    text = "the cat sat on the mat. the cat ran to the mat and"
    content = b"\xff" if seed is None else np.random.default_rng(seed).bytes(4099)
    damage(store, name, content)
    with pytest.raises(StoreCorruptError):
        verify_datastore(store)
    try:
        opened = open_datastore(store)
    except StoreCorruptError:
        assert name == "vocabulary"
        return
    ids = np.array(tokenizer.encode(text).ids, np.int32)
    for preset in PRESETS:
        with suppress(StoreCorruptError):
            draft(opened, preset, ids)
    with suppress(StoreCorruptError):
        search_datastore(opened, text)


@pytest.mark.parametrize("name", ["tokens", "documents", "suffix_array", "document_paths", "document_hashes"])
def test_changes_do_not_put_new_checksums_on_damage(store, tokenizer, tmp_path, name):
    (path,) = store.glob(f"segments/*/{name}.bin")
    flip(path)
    before = (store / "manifest.json").read_bytes()
    removal = () if name in ("tokens", "suffix_array") else (lambda: remove_documents(store, ["b.txt"]),)
    for change in (  # a removal writes nothing of these two anew
        *removal,
        lambda: compact_datastore(store),
        lambda: retokenize_datastore(store, tokenizer, workers=1),
    ):
        with pytest.raises(StoreCorruptError):
            change()
    assert (store / "manifest.json").read_bytes() == before
    merge_datastores(tmp_path / "merged", [store])  # takes files over under the checksums that they had
    with pytest.raises(StoreCorruptError):
        verify_datastore(tmp_path / "merged")


HIDDEN = np.random.default_rng(5).normal(size=(4, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def whole(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write(folder / "texts", {name: f"{name}: the cat sat on the mat. " * 3 for name in ("a.txt", "b.txt")})
    config = StoreConfig(dense=DenseConfig(save_model(folder / "model"), dims=8, window=32, overlap=8))
    build_datastore(folder / "s", str(folder / "texts"), tokenizer, config=config)
    return folder / "s"


@pytest.fixture
def dense(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "dense")


def segment_file(store, name):
    (segment,) = (store / "segments").iterdir()
    return segment / name


def search(store):
    return open_datastore(store).dense[0][1].search(HIDDEN, 30)


@pytest.mark.parametrize("name", DENSE_FILES)
@pytest.mark.parametrize("at", [0, 0.5, 1])
def test_one_flipped_bit_of_keys_is_found_before_the_first_search_and_by_verify(dense, name, at):
    flip(segment_file(dense, name), at)
    for look in (search, verify_datastore):
        with pytest.raises(StoreCorruptError, match=f"checksum.*{name}"):
            look(dense)
    with pytest.raises(StoreCorruptError, match="checksum"):  # before the text that is drafted from it has begun
        DenseSource(DenseIndexes([open_datastore(dense)])).prepare()


@pytest.mark.parametrize("name", DENSE_FILES)
def test_keys_cut_empty_or_missing_are_found_by_opening(dense, name):
    path = segment_file(dense, name)
    content = path.read_bytes()
    for left in (content[:-1], content[:9], b""):
        path.write_bytes(left)
        with pytest.raises(StoreCorruptError, match=name):
            open_datastore(dense)
    path.unlink()
    with pytest.raises(StoreCorruptError, match="no such file"):
        open_datastore(dense)


def index_of(kind, *options, count=3):
    index = kind(*options)
    keys = np.ones((count, index.d), np.float32)
    index.train(keys)
    index.add(keys)
    return faiss.serialize_index(index).tobytes()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (INDEX, b"no index at all", "a FAISS index"),
        (INDEX, index_of(faiss.IndexFlatL2, 8), "a FAISS index"),
        (INDEX, index_of(faiss.IndexScalarQuantizer, 8, faiss.ScalarQuantizer.QT_8bit), "a FAISS index"),
        (INDEX, index_of(faiss.IndexFlatIP, 4), "keys of 8 dimensions"),
        (INDEX, index_of(faiss.IndexFlatIP, 8, count=0), "keys of 8 dimensions"),
        (INDEX, index_of(faiss.IndexFlatIP, 8), "keys of 8 dimensions"),
        ("dense_mean.bin", bytes(4 * 15), "transform"),
    ],
)
def test_wrong_keys_with_right_checksums_are_found(dense, name, content, words):
    forge(dense, name, lambda _: np.frombuffer(content, np.uint8))
    for look in (search, verify_datastore):
        with pytest.raises(StoreCorruptError, match=words):
            look(dense)


@pytest.mark.parametrize("change", [lambda p: p + (1 << 30), lambda p: p[::-1], lambda p: p + 1, lambda p: p[:-1]])
def test_wrong_positions_with_right_checksums_are_found(dense, change):
    forge(dense, POSITIONS, change)
    with pytest.raises(StoreCorruptError):
        verify_datastore(dense)


@pytest.mark.parametrize("name", [*DENSE_FILES, "suffix_array.bin", "manifest.json", "document_paths.bin"])
def test_files_that_may_not_be_read(dense, name, command, monkeypatch):
    def refusing(opened):
        def refuse(path, *arguments, **options):
            if Path(path).name == name:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return opened(path, *arguments, **options)

        return refuse

    monkeypatch.setattr(Path, "open", refusing(Path.open))
    monkeypatch.setattr(os, "open", refusing(os.open))
    with pytest.raises(StoreError, match=rf"could not read .*{name}: Permission denied"):
        open_datastore(dense)
    code, _, err = command("verify", dense)
    assert code == 1 and "Permission denied" in err
