from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock
from waiting import wait_for

from retrieve_spec.config import ServeConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import ServeError, StoreLockedError
from retrieve_spec.server import workspace as workspace_module
from retrieve_spec.server.workspace import (
    Workspace,
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
    monkeypatch.setattr(workspace_module, "_EVERY_S", 0.0)
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


def test_forgetting_ends_a_scan_under_way(folder):
    workspace = Workspace([folder], ServeConfig())
    read = workspace._filter.read
    workspace._filter.read = lambda path: workspace.forget() or read(path)
    workspace.scan()
    assert workspace.texts == {} and workspace.chars == 0
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


def follow(folder, tokenizer, build, monkeypatch):
    """A workspace that is followed by a store which is built so, and what was attached."""
    monkeypatch.setattr(workspace_module, "build_datastore", build)
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
        patch.setattr(workspace_module, "_END_OF_WRITE_S", 0.1)
        with pytest.raises(StoreLockedError, match="writing"):
            forget_workspace([folder])
    assert held_documents(open_datastore(store.folder))
    threading.Timer(0.3, lock.release).start()
    assert forget_workspace([folder])
    assert not lock.is_locked and not kept_workspaces() and not list(memory_folder([folder]).parent.iterdir())


def test_a_store_that_another_server_is_building_is_left_alone(folder, attached, store):
    begun = store.folder / "begun"
    begun.mkdir(parents=True)
    with FileLock(store.folder.parent / "server.lock"):
        assert not store.sync()  # to be tried again
        assert begun.exists()
        assert attached == [None]
    assert store.sync()
    assert attached[-1].manifest.documents > 0
