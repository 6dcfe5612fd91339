"""Dense indexes whose files changed: an error that says so before FAISS reads them, and no place outside the text."""

import errno
import os
import shutil
from pathlib import Path

import faiss
import numpy as np
import pytest
from dense_models import save_model
from folders import flip, write
from test_corruption import forge

from retrieve_spec.cli import run
from retrieve_spec.config import DenseConfig, StoreConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.dense import DENSE_FILES, INDEX, POSITIONS
from retrieve_spec.datastore.inspection import verify_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import StoreCorruptError, StoreError
from retrieve_spec.sources.dense import DenseIndexes, DenseSource

HIDDEN = np.random.default_rng(5).normal(size=(4, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def whole(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write(folder / "texts", {name: f"{name}: the cat sat on the mat. " * 3 for name in ("a.txt", "b.txt")})
    config = StoreConfig(dense=DenseConfig(save_model(folder / "model"), dims=8, window=32, overlap=8))
    build_datastore(folder / "s", str(folder / "texts"), tokenizer, config=config)
    return folder / "s"


@pytest.fixture
def store(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "s")


def segment_file(store, name):
    (segment,) = (store / "segments").iterdir()
    return segment / name


def search(store):
    return open_datastore(store).dense[0][1].search(HIDDEN, 30)


@pytest.mark.parametrize("name", DENSE_FILES)
@pytest.mark.parametrize("at", [0, 0.5, 1])
def test_one_flipped_bit_is_found_before_the_first_search_and_by_verify(store, name, at):
    flip(segment_file(store, name), at)
    for look in (search, verify_datastore):
        with pytest.raises(StoreCorruptError, match=f"checksum.*{name}"):
            look(store)
    with pytest.raises(StoreCorruptError, match="checksum"):  # before the text that is drafted from it has begun
        DenseSource(DenseIndexes([open_datastore(store)])).prepare()


@pytest.mark.parametrize("name", DENSE_FILES)
def test_files_cut_empty_or_missing_are_found_by_opening(store, name):
    path = segment_file(store, name)
    content = path.read_bytes()
    for left in (content[:-1], content[:9], b""):
        path.write_bytes(left)
        with pytest.raises(StoreCorruptError, match=name):
            open_datastore(store)
    path.unlink()
    with pytest.raises(StoreCorruptError, match="no such file"):
        open_datastore(store)


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
def test_wrong_files_with_right_checksums_are_found(store, name, content, words):
    forge(store, name, lambda _: np.frombuffer(content, np.uint8))
    for look in (search, verify_datastore):
        with pytest.raises(StoreCorruptError, match=words):
            look(store)


@pytest.mark.parametrize("change", [lambda p: p + (1 << 30), lambda p: p[::-1], lambda p: p + 1, lambda p: p[:-1]])
def test_wrong_positions_with_right_checksums_are_found(store, change):
    forge(store, POSITIONS, change)
    with pytest.raises(StoreCorruptError):
        verify_datastore(store)


@pytest.mark.parametrize("name", [*DENSE_FILES, "suffix_array.bin", "manifest.json", "document_paths.bin"])
def test_files_that_may_not_be_read(store, name, monkeypatch, capfd):
    def refusing(opened):
        def refuse(path, *arguments, **options):
            if Path(path).name == name:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return opened(path, *arguments, **options)

        return refuse

    monkeypatch.setattr(Path, "open", refusing(Path.open))
    monkeypatch.setattr(os, "open", refusing(os.open))
    with pytest.raises(StoreError, match=rf"could not read .*{name}: Permission denied"):
        open_datastore(store)
    assert run(["verify", str(store)]) == 1
    assert "Permission denied" in capfd.readouterr().err
