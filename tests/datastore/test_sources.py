"""What builds read: folders, files of records and compressed ones in order, and recipes."""

import gzip
import json
import os
import socket
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from folders import write

import retrieve_spec
from retrieve_spec.datastore import fingerprint, sources
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.entry_filter import zstd
from retrieve_spec.datastore.fingerprint import encode
from retrieve_spec.datastore.git_rules import Reason
from retrieve_spec.datastore.ingest import texts_of, tokenise
from retrieve_spec.datastore.sources import Source, glob, list_files, load_recipe
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import BuildError

LIMIT = 10_000


def read(tokenizer, *sources, limit=LIMIT):
    given = tuple(s if isinstance(s, Source) else Source(str(s)) for s in sources)
    files = list_files(given)
    return list(tokenise(files, tokenizer, limit))


def outcome(results):
    return {r.row.path: r.skip for r in results}


@pytest.mark.parametrize(
    ("pattern", "matches", "misses"),
    [
        ("*.py", ["a.py", "x/y/a.py"], ["a.pyc", "py"]),
        ("**/*.py", ["a.py", "x/a.py"], ["a.txt"]),
        ("x/**", ["x/a", "x/y/z"], ["y/x/a", "x"]),
        ("x/*.py", ["x/a.py"], ["x/y/a.py", "a.py"]),
        ("a?.[x]", ["ab.[x]"], ["ab.x"]),
    ],
)
def test_globs(pattern, matches, misses):
    assert all(glob(pattern).fullmatch(path) for path in matches)
    assert not any(glob(pattern).fullmatch(path) for path in misses)


def test_folder_in_order_with_filters(tokenizer, texts):
    assert list(outcome(read(tokenizer, texts))) == ["a.txt", "b.txt", "c.py", "sub/d.txt"]
    assert list(outcome(read(tokenizer, Source(str(texts), include=("*.txt",), exclude=("sub/**",))))) == [
        "a.txt",
        "b.txt",
    ]


def test_bad_files_are_skipped_with_a_reason(tokenizer, tmp_path):
    files = {"good.txt": "fine", "huge.txt": "x" * (LIMIT + 1), "bomb.txt.gz": gzip.compress(b"a" * 50_000_000)}
    broken = {"broken.gz": b"\x1f\x8b not gzip", "broken.txt.zst": b"no zstd"}
    folder = write(tmp_path / "bad", files | broken)
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(folder / "socket"))  # whose whole path may be too long
    (folder / "inside.txt").symlink_to(folder / "good.txt")
    assert outcome(read(tokenizer, folder)) == {
        "bomb.txt.gz": Reason.LARGE,  # before it is unpacked
        "broken.gz": Reason.DAMAGED,
        "broken.txt.zst": Reason.DAMAGED,
        "good.txt": "",
        "huge.txt": Reason.LARGE,
        "inside.txt": Reason.LINK,
        "pipe": Reason.SPECIAL,
        "socket": Reason.SPECIAL,
    }


def test_records(tokenizer, records, tmp_path):
    results = read(tokenizer, Source(str(records), "MIT", field="output"))
    assert [r.row.path for r in results] == [f"answers.jsonl#{i}" for i in range(1, 6)]
    assert tokenizer.decode(results[2].ids.tolist()) == "answer number 2 is 4"
    assert {r.row.licence for r in results} == {"MIT"}
    nested = read(tokenizer, Source(str(records), field="meta.text"))
    assert tokenizer.decode(nested[1].ids.tolist()) == "nested 1"


def test_bad_records(tokenizer, tmp_path):
    path = tmp_path / "r.jsonl"
    lines = ['{"text": "a"}', "", "{not json", '{"other": 1}', '{"text": 5}', json.dumps({"text": "x" * LIMIT}), "[]"]
    path.write_text("\n".join([*lines, '{"text": "\\ud800"}', '{"text": "last"}']))
    assert list(outcome(read(tokenizer, path)).items()) == [
        ("r.jsonl#1", ""),
        ("r.jsonl#3", "no JSON"),
        ("r.jsonl#4", "no field 'text'"),
        ("r.jsonl#5", "no field 'text'"),
        ("r.jsonl#6", Reason.LARGE),
        ("r.jsonl#7", "no field 'text'"),
        ("r.jsonl#8", Reason.ENCODING),
        ("r.jsonl#9", ""),
    ]


def test_compressed_records_and_text(tokenizer, records, tmp_path):
    packed = {"r.jsonl.gz": gzip.compress(records.read_bytes()), "t.txt.zst": zstd.compress(b"some text")}
    write(tmp_path, packed)
    results = read(tokenizer, Source(str(tmp_path / "r.jsonl.gz"), field="output"), tmp_path / "t.txt.zst")
    assert len(results) == 6
    assert tokenizer.decode(results[-1].ids.tolist()) == "some text"


def test_parquet(tokenizer, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["one", None, "three"], "n": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "t.parquet")
    assert outcome(read(tokenizer, tmp_path / "t.parquet")) == {
        "t.parquet#1": "",
        "t.parquet#2": "no field 'text'",
        "t.parquet#3": "",
    }
    ends = pyarrow.py_buffer(np.array([0, 3, 8], np.int32).tobytes())
    unlooked = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, ends, pyarrow.py_buffer(b"ab\xffhello")])
    times = pyarrow.array([2**62], pyarrow.timestamp("ms"))
    parquet.write_table(pyarrow.table({"text": unlooked}), tmp_path / "e.parquet")
    parquet.write_table(pyarrow.table({"text": times}), tmp_path / "f.parquet")
    assert outcome(read(tokenizer, tmp_path / "e.parquet", tmp_path / "f.parquet")) == {
        "e.parquet#1": "no field 'text'",
        "e.parquet#2": "",
        "f.parquet#1": "no field 'text'",
    }
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    assert outcome(read(tokenizer, tmp_path / "bad.parquet")) == {"bad.parquet": Reason.DAMAGED}


@pytest.mark.parametrize("step", [30, 64, 400])
def test_parts_of_a_large_file_of_records_are_the_whole(tokenizer, tmp_path, monkeypatch, step):
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {i} " * (1 + i % 7)}) + "\n" * (1 + i % 3) for i in range(40)))
    whole = [(r.row.path, r.skip, r.ids.tolist()) for r in read(tokenizer, path)]
    monkeypatch.setattr(sources, "SHARD_BYTES", step)
    monkeypatch.setattr(sources, "_BLOCK", 17)
    given = (Source(str(path)),)
    files = [part for file in list_files(given) for part in sources._divided(file)]
    assert len(files) > 1
    assert sum(file.size for file in files) == path.stat().st_size
    parts = tokenise(files, tokenizer, LIMIT)
    assert [(r.row.path, r.skip, r.ids.tolist()) for r in parts] == whole


def test_of_a_file_that_grows_no_more_is_read_than_was_listed(tokenizer, tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"text": "one"}\n{"te')
    sources = (Source(str(path)),)
    (file,) = list_files(sources)
    with path.open("a") as more:
        more.write('xt": "two"}\n{"text": "three"}\n')
    assert [text.path for text in texts_of([file], LIMIT)] == ["r.jsonl#1", "r.jsonl#2"]


def test_long_text_is_encoded_in_pieces(tokenizer, monkeypatch):
    monkeypatch.setattr(fingerprint, "PIECE_CHARS", 10)
    text = "short\nlonger line without end to cut in the middle\nend"
    ids = encode(tokenizer, text)
    assert ids.dtype == np.uint32
    assert tokenizer.decode(ids.tolist()) == text


def test_a_file_that_a_glob_leaves_out_is_listed(tokenizer, texts):
    assert outcome(read(tokenizer, Source(str(texts / "a.txt"), include=("*.py",)))) == {"a.txt": "left out by a glob"}
    assert outcome(read(tokenizer, Source(str(texts / "a.txt"), exclude=("x/*.txt",), prefix="x/"))) == {
        "x/a.txt": "left out by a glob"
    }


RECIPES = Path(retrieve_spec.__file__).parents[1] / "datastores"


def test_standard_library(tmp_path):
    recipe = load_recipe(RECIPES / "python-stdlib.toml")
    paths = {file.path for file in list_files(recipe.sources)}
    assert {"json/decoder.py", "os.py"} <= paths
    assert not any("/test/" in path or path.startswith("site-packages") for path in paths)
    assert recipe.sources[0].licence == "PSF-2.0"
    part = load_recipe(RECIPES / "python-stdlib.toml", include=["json/**"])
    build_datastore(tmp_path / "s", list(part.sources), "reference", max_tokens=5_000, recipe=recipe.name)
    store = open_datastore(tmp_path / "s", tokenizer="reference")
    assert store.manifest.history[0]["recipe"] == "python-stdlib"
    assert store.document_at(0, 0).licence == "PSF-2.0"


def test_installed_packages_carry_their_names_and_licences():
    recipe = load_recipe(RECIPES / "installed-packages.toml", exclude=["click/**", "**/typing_extensions.py"])
    licences = {file.path: file.source.licence for file in list_files(recipe.sources) if not file.skip}
    assert "MIT" in licences["_pytest/main.py"]
    assert "numpy/ma/core.py" in licences
    assert not any(path.startswith("click/") or "typing_extensions" in path for path in licences)
    again = load_recipe(RECIPES / "installed-packages.toml", include=["click/**"])
    assert [s.path for s in again.sources] == [s.path for s in recipe.sources]
    assert {file.path.split("/")[0] for file in list_files(again.sources) if not file.skip} == {"click"}


def test_namespace_folders_belong_to_several_distributions(monkeypatch, tmp_path):
    for name, licence, files in (
        ("first", "MIT", ("shared/one/__init__.py", "shared/one/deep/a.py", "shared/loose.py")),
        ("second", "BSD-3-Clause", ("shared/two/__init__.py", "single.py", "../bin/tool.py")),
    ):
        about = {
            "METADATA": f"Metadata-Version: 2.4\nName: {name}\nLicense-Expression: {licence}\n",
            "RECORD": "".join(f"{file},,\n" for file in files),
        }
        write(tmp_path / f"{name}-1.0.dist-info", about)
        write(tmp_path, {file: f"name = {file!r}" for file in files})
    monkeypatch.setattr(metadata, "distributions", lambda: metadata.Distribution.discover(path=[str(tmp_path)]))
    recipe = load_recipe(RECIPES / "installed-packages.toml")
    assert {file.path: file.source.licence for file in list_files(recipe.sources)} == {
        "shared/one/__init__.py": "MIT",
        "shared/one/deep/a.py": "MIT",
        "shared/loose.py": "MIT",
        "shared/two/__init__.py": "BSD-3-Clause",
        "single.py": "BSD-3-Clause",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not toml at all", "could not read recipe"),
        ('name = "x"', r"\[\[source\]\]"),
        ('name = "x"\ncolour = 1\n[[source]]\npath = "."', "got colour"),
        ('name = "x"\n[[source]]\npath = "."\nlicense = "MIT"', "got license"),
        ('name = "x"\nsource = [1]', r"\[\[source\]\]"),
        ('[[source]]\npath = "."', r"a name and \[\[source\]\]"),
        ('name = "x"\n[[source]]\nlicence = "MIT"', "a path, or distributions"),
    ],
)
def test_bad_recipes(tmp_path, content, message):
    (tmp_path / "r.toml").write_text(content)
    with pytest.raises(BuildError, match=message):
        load_recipe(tmp_path / "r.toml")
