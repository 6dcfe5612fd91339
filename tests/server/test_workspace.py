import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from filelock import FileLock
from waiting import HANG_S, wait_for

from retrieve_spec.config import ServeConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import ServeError, StoreLockedError
from retrieve_spec.server import workspace as workspace_module
from retrieve_spec.server.workspace import Workspace, forget_workspace, kept_workspaces, memory_folder

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


def names(attached):
    """Documents of the store that was attached last."""
    return set() if attached[-1] is None else {document.path for document in attached[-1].documents()}


@pytest.fixture
def attached():
    """What a workspace has attached."""
    return []


@pytest.fixture
def workspace(folder, tokenizer, attached):
    return Workspace([folder], ServeConfig(), tokenizer, attached.append)


@pytest.fixture
def followed(workspace):
    workspace.start()
    assert workspace.indexed.wait(HANG_S)
    yield workspace
    workspace.close()


def test_what_counts(workspace, folder, tokenizer, attached):
    assert workspace.sync()
    assert names(attached) == {"a.py", "sub/b.py", "sub/.gitignore", "sub/keep.log", ".gitignore"}
    assert memory_folder([folder]).stat().st_mode & 0o077 == 0
    assert workspace.sync() and len(attached) == 1  # nothing has changed
    again = Workspace([folder], ServeConfig(), tokenizer, attached.append)
    assert again.sync() and attached[-1].manifest == attached[0].manifest
    with pytest.raises(ServeError, match="folder"):
        Workspace([folder / "nowhere"], ServeConfig(), tokenizer, attached.append)


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="names there are always Unicode")
def test_a_name_that_is_not_utf8_ends_nothing(folder, followed, attached):
    def is_followed():
        for path in (os.fsencode(folder) + b"/caf\xe9.py", folder / "new.py"):  # no notice comes without the first
            with open(path, "w") as file:
                file.write(f"fresh_name = {time.monotonic()}\n")
        return "new.py" in names(attached)

    wait_for(is_followed)


def test_saves_are_followed(folder, followed, attached):
    (folder / "sub").rename(folder / "moved")
    (folder / "a.py").write_text("def other_name(items):\n    pass\n")
    (folder / ".gitignore").write_text("*.log\nbuilt/\nb.py\n")
    wait_for(lambda: names(attached) == {"a.py", "moved/.gitignore", "moved/keep.log", ".gitignore"})
    assert followed.state()["indexed"] and followed.files == 4


def test_what_changed_last_counts_first_and_the_rest_is_said(tmp_path, folder, tokenizer, attached):
    place = tmp_path / "large"
    for number in range(40):
        path = place / f"d{number:02}" / "f.py"
        path.parent.mkdir(parents=True)
        path.write_text(f"x = {number:02}\n")
        os.utime(path, (1_000_000, 1_000_000 + number))
    (place / "picture.png").write_bytes(b"\0" * 500)
    workspace = Workspace([place], ServeConfig(workspace_bytes=69), tokenizer, attached.append)
    workspace.sync()
    assert names(attached) == {f"d{number}/f.py" for number in range(30, 40)}
    assert workspace.state()["left_out"] == {"binary": 1, "beyond the bound of text": 30}
    (place / "new.py").write_text("fresh=1\n")
    workspace.sync()
    assert len(names(attached)) == 10 and "new.py" in names(attached)


def test_folders_without_text_are_no_store_and_followed_like_others(folder, tmp_path, tokenizer, attached):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "id_rsa").write_text("x\n")
    other = Workspace([empty], ServeConfig(), tokenizer, attached.append)
    other.start()
    assert other.indexed.wait(HANG_S)
    assert not attached
    assert other.state() == {"indexed": True, "files": 0, "left_out": {"a secret by its name": 1}}
    (empty / "new.py").write_text("fresh_name = 1\n")
    wait_for(lambda: attached and names(attached) == {"new.py"} and other.state()["indexed"])
    (empty / "new.py").unlink()
    wait_for(lambda: attached[-1] is None)
    other.close()


def stored_text(store, tokenizer):
    texts = (s.text_ids(i).tolist() for s in store.segments for i in range(len(s.document_starts) - 1))
    return "".join(map(tokenizer.decode, texts))


def test_deleted_secret_and_linked_files_cannot_be_decoded_from_the_store(
    folder, tmp_path, tokenizer, workspace, attached
):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "b.py").write_text("private_name = 'nobody let it in'\n" * 5)
    (folder / "gone.py").write_text("deleted_name = 'never to be seen again'\n" * 3)
    (folder / "key.py").write_text("later_secret = 'this is the text of it'\n" * 3)
    (folder / "linked.py").write_text("replaced_name = 'by a link'\n" * 3)
    workspace.sync()
    words = "deleted_name", "later_secret", "replaced_name"
    assert all(word in stored_text(attached[-1], tokenizer) for word in words)
    (folder / "gone.py").unlink()
    (folder / "key.py").write_text("x = '-----BEGIN RSA PRIVATE KEY-----'\n")
    (folder / "linked.py").unlink()
    (folder / "linked.py").symlink_to(outside / "b.py")
    (folder / "sub").rename(tmp_path / "moved")
    (folder / "sub").symlink_to(outside)
    workspace.sync()
    text = stored_text(attached[-1], tokenizer)
    raw = b"".join(path.read_bytes() for path in attached[-1].path.rglob("*") if path.is_file())
    assert "compute_total" in text
    for word in (*words, "private_name"):
        assert word not in text and word.encode() not in raw


def test_what_an_older_release_kept_is_not_gone_on_with(folder, tokenizer, workspace, attached):
    build_datastore(workspace.folder, [str(folder / "a.py")], tokenizer)
    (folder / "a.py").unlink()
    workspace.sync()
    assert "compute_total" not in stored_text(attached[-1], tokenizer)


def test_a_workspace_is_forgotten_while_its_store_is_being_written(folder, workspace, attached, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    sync_datastore = workspace_module.sync_datastore

    def slow(*args, **kwargs):
        begun.set()
        assert go_on.wait(HANG_S)
        return sync_datastore(*args, **kwargs)

    monkeypatch.setattr(workspace_module, "sync_datastore", slow)
    workspace.start()
    assert begun.wait(HANG_S)
    with ThreadPoolExecutor() as threads:
        threads.submit(workspace.forget)
        wait_for(lambda: workspace.state().get("forgotten"))
        go_on.set()
    assert attached[-1] is None and not memory_folder([folder]).exists()
    assert workspace.sync() and attached[-1] is None and not memory_folder([folder]).exists()
    workspace.close()


def test_forget_finds_a_folder_in_every_store(folder, tmp_path, tokenizer):
    other, third, fourth = tmp_path / "other", tmp_path / "third", tmp_path / "fourth"
    for path in (other, third, fourth):
        path.mkdir()
        (path / "o.py").write_text("other = 1\n" * 3)
    for roots in ([folder, other], [folder], [third], [fourth]):
        Workspace(roots, ServeConfig(), tokenizer, lambda store: None).sync()
    assert len(kept_workspaces()) == 4
    gone = forget_workspace([folder])
    assert sorted(map(sorted, gone)) == sorted([sorted([folder, other.resolve()]), [folder]])
    assert sorted(kept_workspaces().values()) == [[fourth.resolve()], [third.resolve()]]
    assert not forget_workspace([folder])
    assert forget_workspace([third / "below"])
    (memory_folder([fourth]) / "workspace.json").unlink()
    assert forget_workspace([folder]) == [[]]  # it may be about any


def test_forget_waits_for_who_writes_and_leaves_all_of_it_where_that_does_not_end(folder, monkeypatch, workspace):
    workspace.sync()
    lock = FileLock(memory_folder([folder]) / "server.lock", thread_local=False)
    lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(workspace_module, "_END_OF_WRITE_S", 0.1)
        with pytest.raises(StoreLockedError, match="writing"):
            forget_workspace([folder])
    assert open_datastore(workspace.folder).manifest.documents
    threading.Timer(0.3, lock.release).start()
    assert forget_workspace([folder])
    assert not lock.is_locked and not kept_workspaces() and not list(memory_folder([folder]).parent.iterdir())


def test_a_store_that_another_server_is_building_is_left_alone(workspace, attached):
    begun = workspace.folder / "begun"
    begun.mkdir(parents=True)
    with FileLock(workspace.folder.parent / "server.lock"):
        assert not workspace.sync()  # to be tried again
        assert begun.exists() and not attached
    assert workspace.sync()
    assert attached[-1].manifest.documents > 0
