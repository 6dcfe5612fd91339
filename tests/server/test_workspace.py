from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import watchfiles
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from waiting import wait_for

from retrieve_spec.config import ServeConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import ServeError, StoreLockedError
from retrieve_spec.server import workspace_store
from retrieve_spec.server.lookups import Provenance
from retrieve_spec.server.run import assemble
from retrieve_spec.server.text import _SENTINEL
from retrieve_spec.server.workspace import Workspace
from retrieve_spec.server.workspace_store import (
    WorkspaceStore,
    forget_workspace,
    held_documents,
    kept_workspaces,
    memory_folder,
)

CODE = "def compute_total(items):\n    return sum(item.price for item in items)\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(workspace_store, "_EVERY_S", 0.0)
    root = tmp_path / "w"
    files = {
        "a.py": CODE,
        "sub/b.py": "x = 1\n",
        "sub/.gitignore": "!keep.log\nlocal.py\n",
        "sub/keep.log": "kept\n",
        "sub/local.py": "ignored = 1\n",
        ".gitignore": "*.log\nbuilt/\n",
        "c.log": "ignored\n",
        "built/d.py": "ignored\n",
        "node_modules/e.js": "ignored\n",
        ".env": "PASSWORD=1\n",
        "id_rsa": "x\n",
        "settings.py": "KEY = '-----BEGIN RSA PRIVATE KEY-----'\n",
        "binary.bin": "a\0b",
        "large.py": "x" * 300_000,
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "link.py").symlink_to("/etc/hostname")
    return root.resolve()


def names(workspace):
    return {str(path.relative_to(workspace.roots[0])) for path in workspace.texts}


def says(workspace, text):
    return any(text in known for known in workspace.texts.values())


@pytest.fixture
def workspace(folder):
    workspace = Workspace([folder], ServeConfig())
    workspace.scan()
    return workspace


@pytest.fixture
def attached():
    """What a store has attached."""
    return []


@pytest.fixture
def store(workspace, tokenizer, attached):
    return WorkspaceStore(workspace, tokenizer, attached.append)


def test_what_counts(workspace, folder):
    with pytest.raises(ServeError, match="folder"):
        Workspace([folder / "nowhere"], ServeConfig())
    assert names(workspace) == {"a.py", "sub/b.py", "sub/.gitignore", "sub/keep.log", ".gitignore"}


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="names there are always Unicode")
def test_a_name_that_is_not_utf8_ends_nothing(folder, tokenizer):
    attached = []
    workspace = Workspace([folder], ServeConfig())
    workspace.follower = WorkspaceStore(workspace, tokenizer, attached.append)
    strange = os.fsencode(folder) + b"/caf\xe9.py"
    with open(strange, "w") as file:
        file.write("early = 1\n")
    workspace.start()
    try:
        assert workspace.indexed.wait(60) and not workspace.trouble
        assert workspace.left_out["its name is not UTF-8"] == 1
        limit = time.monotonic() + 60
        while "new.py" not in names(workspace):
            with open(strange, "w") as file:
                file.write(f"late = {time.monotonic()}\n")
            (folder / "new.py").write_text(f"fresh_name = {time.monotonic()}\n")
            time.sleep(0.02)  # no notice comes without the strange name
            assert time.monotonic() < limit, "saves are not noticed any more"
        wait_for(lambda: attached and any("new.py" in path for path in held_documents(attached[-1])))
    finally:
        workspace.close()


def test_a_linked_folder_leads_nowhere_when_a_file_in_it_changes(folder, tmp_path, workspace):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "private.py").write_text("private_name = 1\n")
    (folder / "linked").symlink_to(outside)
    before = names(workspace)
    assert not workspace.update([folder / "linked" / "private.py", folder / "linked", outside / "private.py"])
    assert names(workspace) == before
    (folder / "sub" / "b.py").unlink()
    (folder / "sub" / "b.py").symlink_to(outside / "private.py")
    workspace.update([folder / "sub" / "b.py"])
    assert not any("private_name" in text for text in workspace.texts.values())


def test_folders_that_move_are_followed(folder, workspace):
    (folder / "sub").rename(folder / "other")
    assert workspace.update([folder / "sub", folder / "other"])
    assert names(workspace) == {"a.py", "other/b.py", "other/.gitignore", "other/keep.log", ".gitignore"}
    assert workspace.texts[folder / "other/b.py"] == "x = 1\n"


def test_what_changed_last_counts_first_and_the_rest_is_said(tmp_path, caplog):
    for number in range(40):
        path = tmp_path / f"d{number:02}" / "f.py"
        path.parent.mkdir()
        path.write_text(f"x = {number}\n")
        os.utime(path, (1_000_000, 1_000_000 + number))
    workspace = Workspace([tmp_path], ServeConfig(workspace_files=10))
    with caplog.at_level(logging.INFO, "retrieve_spec.server"):
        workspace.scan()
    assert names(workspace) == {f"d{number}/f.py" for number in range(30, 40)}
    assert workspace.left_out == {"beyond the bound of files": 30}
    assert "10 files are drafted from; left out: 30 beyond the bound of files" in caplog.text
    (tmp_path / "new.py").write_text("fresh = 1\n")
    assert workspace.update([tmp_path / "new.py"])
    assert len(names(workspace)) == 10 and "new.py" in names(workspace)


@pytest.mark.slow
def test_small_files_of_a_large_repository_are_all_there(tmp_path):
    for number in range(20_500):
        if number % 500 == 0:
            (tmp_path / f"d{number // 500}").mkdir()
        (tmp_path / f"d{number // 500}" / f"f{number}.py").write_text(f"value_{number} = {number}\n")
    workspace = Workspace([tmp_path], ServeConfig())
    workspace.scan()
    assert not workspace.left_out
    assert all(workspace.lines(f"value_{number} =", 1) for number in (0, 9_999, 20_499))


def test_how_far_a_scan_is_can_be_told(tmp_path):
    for number in range(250):
        (tmp_path / f"m{number}.py").write_text(f"def helper_{number}(item):\n    return item\n")
    workspace, seen = Workspace([tmp_path], ServeConfig()), []
    workspace.progress = lambda done, kept: seen.append((done, workspace.indexed.is_set(), workspace.read))
    workspace.scan()
    assert seen == [(at, False, (at + 1, 250)) for at in (0, 100, 200)]
    assert workspace.indexed.is_set() and says(workspace, "def helper_0(")


def test_what_changes_while_everything_is_read_is_followed(tmp_path):
    (tmp_path / "a.py").write_text("def before(item):\n    return item\n")
    workspace = Workspace([tmp_path], ServeConfig())
    read = workspace._filter.read

    def edited(path):
        text = read(path)
        if not workspace.indexed.is_set():
            path.write_text("def behind(item):\n    return item\n")
            (tmp_path / "b.py").write_text("def another(item):\n    return item\n")
        return text

    workspace._filter.read = edited
    workspace.start()
    try:
        wait_for(lambda: says(workspace, "def behind(") and says(workspace, "def another("))
        assert not says(workspace, "def before(")
    finally:
        workspace.close()


def test_what_changes_comes_before_what_is_old_where_there_is_no_room_for_both(tmp_path):
    for number in range(10):
        path = tmp_path / "old" / f"m{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def helper_{number}(item):\n    return item\n")
        os.utime(path, (1_000_000, 1_000_000 + number))
    room = sum(path.stat().st_size for path in tmp_path.rglob("*.py"))
    workspace = Workspace([tmp_path], ServeConfig(workspace_chars=room))
    workspace.scan()
    assert not workspace.left_out
    (tmp_path / "old").rename(tmp_path / "new")
    workspace.update([tmp_path / "new", tmp_path / "old"])
    assert names(workspace) == {f"new/m{number}.py" for number in range(10)} and not workspace.left_out
    (tmp_path / "new" / "m0.py").write_text("def grown(item):\n    return item, 1\n" * 2)
    workspace.update([tmp_path / "new" / "m0.py"])
    assert workspace.chars <= room and workspace.left_out["beyond the bound of text"] >= 1
    assert says(workspace, "def grown(")
    assert workspace.chars == sum(map(len, workspace.texts.values()))
    gone = {f"new/m{number}.py" for number in range(10)} - names(workspace)
    assert gone and not any(says(workspace, f"def helper_{name[5]}(") for name in gone)


def test_forgetting_ends_a_scan_under_way(folder):
    workspace = Workspace([folder], ServeConfig())
    workspace.progress = lambda done, kept: workspace.forget()
    workspace.scan()
    assert workspace.texts == {} and workspace.chars == 0
    workspace.progress = None
    assert not workspace.update([folder / "a.py"])
    workspace.scan()
    assert workspace.texts == {}


def test_changes_are_followed(folder, workspace):
    (folder / "a.py").write_text("def other_name(items):\n    pass\n")
    assert workspace.update([folder / "a.py"])
    assert not workspace.update([folder / "a.py"])
    assert says(workspace, "def other_name(") and not says(workspace, "def compute_total(")
    (folder / "a.py").unlink()
    assert workspace.update([folder / "a.py"])
    assert "a.py" not in names(workspace)
    (folder / ".env").write_text("PASSWORD=2\n")
    assert not workspace.update([folder / ".env", folder / "sub/local.py", folder.parent / "elsewhere.py"])
    (folder / ".gitignore").write_text("sub/\n")
    workspace.update([folder / ".gitignore"])
    assert names(workspace) == {".gitignore", "c.log"} | ({"built/d.py"} & names(workspace))


@pytest.mark.parametrize(
    ("failures", "error", "sysctl"),
    [(1, "OS file watch limit reached. about [...]", "watches"), (1, "Too many open files", "instances"), (3, "", "")],
)
def test_where_watches_are_used_up_folders_are_looked_at(folder, monkeypatch, caplog, failures, error, sysctl):
    """What cannot be followed at all is tried again."""
    watch, failed = watchfiles.watch, []

    def limited(*roots, **how):
        if len(failed) < failures:
            failed.append(roots)
            raise OSError(error)
        return watch(*roots, **how)

    monkeypatch.setattr("watchfiles.watch", limited)
    monkeypatch.setattr("retrieve_spec.datastore.sync.LOOK_MS", 50)
    monkeypatch.setattr("retrieve_spec.server.workspace._PAUSE_S", 0.01)
    workspace = Workspace([folder], ServeConfig())
    workspace.start()
    try:
        wait_for(lambda: len(failed) == failures and workspace.indexed.is_set() and not workspace.trouble)
        for name in ("new", "newer"):
            (folder / f"{name}.py").write_text(f"def fresh_{name}(item):\n    return item\n")
            wait_for(lambda name=name: says(workspace, f"fresh_{name}("))
        assert (f" fs.inotify.max_user_{sysctl}=" in caplog.text) == bool(sysctl)
        assert ("Traceback" in caplog.text) == (not sysctl)
    finally:
        workspace.close()


def test_store_follows_and_is_forgotten(folder, tokenizer, workspace, attached, store):
    assert store.sync()
    assert {Path(p).name for p in held_documents(attached[-1])} == {"a.py", "b.py", ".gitignore", "keep.log"}
    assert memory_folder([folder]).stat().st_mode & 0o077 == 0
    (folder / "sub").rename(folder / "moved")
    workspace.update([folder / "sub", folder / "moved"])
    store.sync()
    assert str(folder / "moved" / "b.py") in held_documents(attached[-1])
    (folder / "a.py").write_text("something_else = 1\n" * 5)
    (folder / "moved/b.py").unlink()
    workspace.update([folder / "a.py", folder / "moved/b.py"])
    store.sync()
    assert {Path(p).name for p in held_documents(attached[-1])} == {"a.py", ".gitignore", "keep.log"}
    again = WorkspaceStore(workspace, tokenizer, attached.append)
    again.sync()
    assert attached[-1].manifest.documents == attached[-2].manifest.documents
    workspace.follower = store
    workspace.forget()
    assert attached[-1] is None
    assert not memory_folder([folder]).exists()


def stored_bytes(store):
    return b"".join(path.read_bytes() for path in store.path.rglob("*") if path.is_file())


def stored_text(store, tokenizer):
    texts = (s.text_ids(i).tolist() for s in store.segments for i in range(len(s.document_starts) - 1))
    return "".join(map(tokenizer.decode, texts))


def test_what_a_file_becomes_before_it_is_stored_stays_out(folder, tmp_path, tokenizer, workspace, attached, store):
    """A store reads files again: what stands there by then may be a link that leads out of the workspace."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("a.py", "b.py"):
        (outside / name).write_text("private_name = 'nobody let it in'\n" * 5)
    (folder / "a.py").unlink()
    (folder / "a.py").symlink_to(outside / "a.py")
    shutil.rmtree(folder / "sub")
    (folder / "sub").symlink_to(outside)
    store.sync()
    assert set(held_documents(attached[-1])) == {str(folder / ".gitignore")}
    assert "private_name" not in stored_text(attached[-1], tokenizer)
    assert b"private_name" not in stored_bytes(attached[-1])


def test_files_that_are_no_single_text_are_not_stored_again_and_again(folder, monkeypatch, workspace, attached, store):
    for number in range(2):  # records of a collection, whose texts are not that of the file
        (folder / f"{number}.jsonl").write_text(json.dumps({"text": f"record = {number}\n" * 5}) + "\n")
    workspace.scan()
    store.sync()
    monkeypatch.setattr(workspace_store, "add_documents", lambda *_, **__: pytest.fail("read again"))
    store.sync()
    assert {Path(p).name for p in held_documents(attached[-1])} == {"a.py", "b.py", ".gitignore", "keep.log"}


def follow(folder, tokenizer, build, monkeypatch):
    """A workspace that is followed by a store which is built so, and what was attached."""
    monkeypatch.setattr(workspace_store, "build_datastore", build)
    attached = []
    workspace = Workspace([folder], ServeConfig())
    workspace.follower = WorkspaceStore(workspace, tokenizer, attached.append)
    workspace.start()
    return workspace, attached


@pytest.fixture
def slow_store(folder, tokenizer, monkeypatch):
    """A workspace that is followed, its store, what was attached, and what lets the store's build go on."""
    begun, go_on = threading.Event(), threading.Event()

    def build(*args, **kwargs):
        begun.set()
        assert go_on.wait(60)
        return build_datastore(*args, **kwargs)

    workspace, attached = follow(folder, tokenizer, build, monkeypatch)
    assert begun.wait(60)
    yield workspace, attached, go_on
    go_on.set()
    workspace.close()


def test_a_store_that_is_being_written_holds_up_nobody(folder, slow_store):
    workspace, attached, go_on = slow_store
    (folder / "new.py").write_text("def fresh_name(item):\n    return item\n")
    wait_for(lambda: says(workspace, "def fresh_name"))
    assert not attached
    go_on.set()
    wait_for(lambda: attached and any("new.py" in path for path in held_documents(attached[-1])))


def test_a_workspace_is_forgotten_while_its_store_is_being_written(folder, slow_store):
    workspace, attached, go_on = slow_store
    forgetting = threading.Thread(target=workspace.forget)
    forgetting.start()
    wait_for(lambda: workspace.forgotten)
    (folder / "new.py").write_text("fresh_name = 1\n")
    go_on.set()
    forgetting.join(60)
    assert attached[-1] is None and not memory_folder([folder]).exists()
    workspace.follower.changed()
    wait_for(lambda: not workspace.follower._news.is_set())
    assert workspace.follower.sync() and attached[-1] is None and not memory_folder([folder]).exists()


def test_a_store_that_cannot_be_written_is_tried_again_with_the_next_change(folder, tokenizer, monkeypatch):
    tried = []

    def build(*args, **kwargs):
        tried.append(args)
        if len(tried) == 1:
            raise RuntimeError("no more threads")
        return build_datastore(*args, **kwargs)

    workspace, attached = follow(folder, tokenizer, build, monkeypatch)
    try:
        wait_for(lambda: tried)
        (folder / "new.py").write_text("fresh_name = 1\n")
        wait_for(lambda: attached and any("new.py" in path for path in held_documents(attached[-1])))
        assert workspace.indexed.is_set() and not workspace.trouble
    finally:
        workspace.close()


def test_deleted_and_secret_files_cannot_be_decoded_from_the_store(folder, tokenizer, workspace, attached, store):
    (folder / "gone.py").write_text("deleted_name = 'never to be seen again'\n" * 3)
    (folder / "key.py").write_text("later_secret = 'this is the text of it'\n" * 3)
    workspace.scan()
    store.sync()

    text = stored_text(attached[-1], tokenizer)
    assert "deleted_name" in text and "later_secret" in text
    (folder / "gone.py").unlink()
    (folder / "key.py").write_text("x = '-----BEGIN RSA PRIVATE KEY-----'\n")
    workspace.update([folder / "gone.py", folder / "key.py"])
    store.sync()
    text, raw = stored_text(attached[-1], tokenizer), stored_bytes(attached[-1])
    assert "compute_total" in text
    for word in ("deleted_name", "later_secret"):
        assert word not in text and word.encode() not in raw


def test_a_small_store_is_prepared_with_and_gone_then(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = []
    workspace_store.prepare_store(tokenizer, lambda store: found.append(len(list(store.documents()))))
    assert found == [1] and not list(tmp_path.iterdir())


def test_a_tokenizer_that_refuses_a_text_costs_the_store_and_not_the_server(tiny, folder, caplog):
    letters = [("</s>", 0.0), *((letter, -1.0) for letter in f"▁a{_SENTINEL}")]
    backend = Tokenizer(models.Unigram(letters, unk_id=None))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert assemble(tiny, tokenizer, "tiny", ServeConfig(), workspaces=[folder]).workspace is not None
    assert "unk_id" in caplog.text


def test_forget_finds_a_folder_in_every_store(folder, tmp_path, tokenizer):
    other, third, fourth = tmp_path / "other", tmp_path / "third", tmp_path / "fourth"
    for path in (other, third, fourth):
        path.mkdir()
        (path / "o.py").write_text("other = 1\n" * 3)
    for roots in ([folder, other], [folder], [third], [fourth]):
        workspace = Workspace(roots, ServeConfig())
        workspace.scan()
        WorkspaceStore(workspace, tokenizer, lambda store: None).sync()
    assert len(kept_workspaces()) == 4
    gone = forget_workspace([folder])
    assert sorted(map(sorted, gone)) == sorted([sorted([folder, other.resolve()]), [folder]])
    assert sorted(kept_workspaces().values()) == [[fourth.resolve()], [third.resolve()]]
    assert not forget_workspace([folder])
    assert forget_workspace([third / "below"])
    (memory_folder([fourth]) / "workspace.json").unlink()
    assert forget_workspace([folder]) == [[]]  # it may be about any


def test_forget_waits_for_who_writes_and_leaves_all_of_it_where_that_does_not_end(folder, monkeypatch, store):
    store.sync()
    lock = FileLock(memory_folder([folder]) / "server.lock", thread_local=False)
    lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(workspace_store, "_END_OF_WRITE_S", 0.1)
        with pytest.raises(StoreLockedError, match="writing"):
            forget_workspace([folder])
    assert held_documents(open_datastore(store.folder))
    threading.Timer(0.3, lock.release).start()
    assert forget_workspace([folder])
    assert not lock.is_locked and not kept_workspaces() and not list(memory_folder([folder]).parent.iterdir())


def test_two_models_have_two_stores(folder, tokenizer, workspace, attached):
    other = copy.deepcopy(tokenizer)
    described = json.loads(other.backend_tokenizer.to_str())
    described["model"]["merges"] = described["model"]["merges"][:-1]
    other._tokenizer = Tokenizer.from_str(json.dumps(described))
    one = WorkspaceStore(workspace, tokenizer, attached.append)
    two = WorkspaceStore(workspace, other, attached.append)
    one.sync()
    two.sync()
    one.sync()
    assert one.folder != two.folder and one.folder.exists() and two.folder.exists()
    assert all(store is not None and store.manifest.documents for store in attached)


def test_a_store_that_another_server_is_building_is_left_alone(folder, attached, store):
    begun = store.folder / "begun"
    begun.mkdir(parents=True)
    with FileLock(store.folder.parent / "server.lock"):
        assert not store.sync()  # to be tried again
        assert begun.exists()
        assert attached == [None]
    assert store.sync()
    assert attached[-1].manifest.documents > 0


def test_an_interrupted_store_is_built_again(folder, attached, store):
    memory_folder([folder]).mkdir(parents=True)
    (memory_folder([folder]) / "manifest.json").write_text("{")
    store.sync()
    assert attached[-1].manifest.documents > 0


def test_provenance_names_file_line_and_licence(folder, workspace, attached, store):
    from retrieve_spec.server.jobs import Completion

    (folder / "LICENSE").write_text("MIT License\n\nCopyright\n")
    workspace.scan()
    store.sync()
    done = Completion(text="    return sum(item.price for item in items)\n    unheard_of_line_of_code()\n")
    found = Provenance([], workspace).of(done)["provenance"]
    place = {"file": str(folder / "a.py"), "line": 2, "licence": "MIT License", "source": "workspace"}
    assert found[0] == {"line": 1, "text": "return sum(item.price for item in items)", "places": [place]}
    assert found[1]["places"] == []
    (place,) = Provenance(attached).of(done)["provenance"][0]["places"]
    assert place["file"] == "a.py"
