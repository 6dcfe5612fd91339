"""Watched folders: what changes is found where the system tells of it, and where it does not."""

import threading

import pytest
from folders import write
from test_build import contents
from waiting import HANG_S, wait_for

from retrieve_spec.config import ServeConfig
from retrieve_spec.datastore import watching
from retrieve_spec.datastore.sync import watch_folders
from retrieve_spec.server import workspace as workspace_module
from retrieve_spec.server.workspace import Workspace

watchfiles = pytest.importorskip("watchfiles")

LOCAL = "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    """Lets the system list other mounts."""

    def list_(*lines):
        listed = tmp_path / "mountinfo"
        listed.write_text(LOCAL + "".join(line + "\n" for line in lines))
        monkeypatch.setattr(watching, "_MOUNTS", listed)

    return list_


@pytest.mark.parametrize(
    ("lines", "silent"),
    [
        ((), False),
        (("30 22 0:44 / {} rw shared:1 master:2 - nfs4 server:/home rw,addr=::1",), True),
        (("30 22 0:44 / {}/a\\040folder rw - 9p host rw",), True),  # a part of it
        (("30 22 0:44 / {0}/x rw - tmpfs none rw", "31 22 0:45 / {0}x rw - cifs //host/share rw"), False),
        (("30 22 0:44 / {} rw - cifs //host/share rw", "31 30 0:45 / {} rw - ext4 /dev/vdb rw"), False),  # covered
        (("30 22 0:44 / / rw - fuse.glusterfs host:/v rw",), True),
    ],
)
def test_file_systems_that_others_write_to_are_known_by_their_type(mounts, tmp_path, lines, silent):
    folder = tmp_path / "f"
    mounts(*(line.format(folder) for line in lines))
    assert watching.lacks_notifications(folder) is silent


@pytest.mark.parametrize(("kind", "polls"), [("nfs", True), ("ext4", None)])
def test_folders_without_notices_are_looked_through(mounts, tmp_path, monkeypatch, kind, polls):
    mounts(f"30 22 0:44 / {tmp_path} rw - {kind} somewhere rw")
    asked = {}

    def watch(*folders, **how):
        asked.update(how)
        yield set()

    monkeypatch.setattr(watchfiles, "watch", watch)
    assert list(watching.changes([tmp_path])) == [set()]
    assert asked["force_polling"] is polls


@pytest.fixture
def no_notices(monkeypatch):
    """A system that tells of no change, and a minute of a tenth of a second."""

    def watch(*folders, stop_event=None, **how):
        stop = stop_event or threading.Event()
        while not stop.wait(0.01):
            yield set()

    monkeypatch.setattr(watchfiles, "watch", watch)
    monkeypatch.setattr(watching, "AGAIN_S", 0.1)


def test_a_store_follows_folders_of_which_nothing_is_told(texts, tokenizer, tmp_path, no_notices):
    told = []

    def tell(report):
        told.append(report)
        if len(told) == 1:
            write(texts, {"new.txt": "nobody tells of this"})
        else:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        watch_folders(tmp_path / "s", [texts], tokenizer=tokenizer, tell=tell)
    assert contents(tmp_path / "s")["new.txt"] == "nobody tells of this"
    assert [report.documents for report in told] == [4, 1], "what is the same is not told again"


def test_a_workspace_follows_folders_of_which_nothing_is_told(texts, tokenizer, tmp_path, no_notices, monkeypatch):
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(workspace_module, "_EVERY_S", 0.0)
    attached = []
    workspace = Workspace([texts], ServeConfig(), tokenizer, attached.append)
    workspace.start()
    try:
        assert workspace.indexed.wait(HANG_S)
        write(texts, {"new.txt": "nobody tells of this"})
        wait_for(lambda: "new.txt" in {document.path for document in attached[-1].documents()})
    finally:
        workspace.close()
