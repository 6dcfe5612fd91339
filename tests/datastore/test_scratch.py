"""Scratch folders: gone afterwards, and gone after the next one where their process was killed; never one in use."""

from __future__ import annotations

import os
import signal

import children
import pytest

from retrieve_spec.datastore.scratch import scratch_folder


def killed_within(above):
    with scratch_folder(above) as folder:
        (folder / "much").write_bytes(b"x" * 1000)
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    children.run(killed_within, tmp_path)
    (left,) = tmp_path.iterdir()
    with scratch_folder(tmp_path) as folder, scratch_folder(tmp_path) as other:
        assert not left.exists()
        assert folder.is_dir() and not list(folder.iterdir()) and folder != other
        assert folder.parent.stat().st_mode & 0o077 == 0
    assert not list(tmp_path.iterdir())


def test_what_others_left_stays(tmp_path):
    children.run(killed_within, tmp_path)
    (left,) = tmp_path.iterdir()
    elsewhere = left.rename(tmp_path / left.name.replace("retrieve-spec-", "retrieve-spec-elsewhere."))
    (tmp_path / left.name).symlink_to(elsewhere)
    with pytest.raises(KeyError), scratch_folder(tmp_path):
        raise KeyError
    assert len(list(tmp_path.iterdir())) == 2
