"""SIGKILL amid sync, push and pull: old or new is what is there, and doing it again ends it."""

from __future__ import annotations

import os
import shutil
import time

import children
import numpy as np
import pytest
from test_build import contents
from test_kill import folder, prepare  # noqa: F401 (a fixture)

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.edit import remove_documents
from retrieve_spec.datastore.share import pull_datastore, push_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.sync import sync_datastore
from retrieve_spec.datastore.verify import verify_datastore
from retrieve_spec.errors import StoreIncompleteError, StoreNotFoundError

KILLS = int(os.environ.get("RETRIEVE_SPEC_KILLS", "4"))
"""Per verb."""


def state(store):
    """Documents of a sound store, None where there is none yet."""
    try:
        open_datastore(store)
    except (StoreNotFoundError, StoreIncompleteError):
        return None
    verify_datastore(store)
    return contents(store)


def state_of_remote(url, place):
    """Documents that a pull brings, None where nothing was ever pushed whole."""
    shutil.rmtree(place, ignore_errors=True)
    try:
        pull_datastore(url, place)
    except StoreNotFoundError:
        return None
    return state(place)


def kill_until_done(change, prepared, looked_at, seed):
    """Kill a change at random moments of it; it is done again each time."""
    prepared()
    old = looked_at()
    children.run(os.getpid)  # the server that starts children is slow once
    started = time.perf_counter()
    children.run(change[0], *change[1:])
    duration = time.perf_counter() - started
    new = looked_at()
    assert new != old
    random = np.random.default_rng(seed)
    kills = 0
    while kills < KILLS:
        prepared()
        if children.run(change[0], *change[1:], kill_after=float(random.uniform(0, duration))):
            kills += 1
        else:
            duration *= 0.8  # the first one took longer
        assert looked_at() in (old, new)
        change[0](*change[1:])
        assert looked_at() == new


@pytest.fixture
def stores(tokenizer, texts, records, folder):  # noqa: F811
    """A store, and the same with more and less in it."""
    config = StoreConfig(segment_tokens=90)
    build_datastore(folder / "base", str(texts), tokenizer, config=config)
    shutil.copytree(folder / "base", folder / "grown")
    add_documents(folder / "grown", Source(str(records), field="output"))
    remove_documents(folder / "grown", ["c.py"])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [True, False])
def test_kill_amid_push(stores, fresh):
    url, remote = f"file://{stores}/remote", stores / "remote"
    push_datastore(stores / "base", url)
    shutil.copytree(stores / "base", stores / "sent")
    shutil.copyfile(stores / "base" / "remotes.json", stores / "grown" / "remotes.json")

    def prepared():
        shutil.rmtree(remote, ignore_errors=True)
        shutil.rmtree(stores / "from", ignore_errors=True)
        shutil.copytree(stores / "grown", stores / "from")
        if fresh:
            (stores / "from" / "remotes.json").unlink()
        else:
            push_datastore(stores / "sent", url)
            shutil.copyfile(stores / "sent" / "remotes.json", stores / "from" / "remotes.json")

    kill_until_done((push_datastore, stores / "from", url), prepared, lambda: state_of_remote(url, stores / "seen"), 1)


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [True, False])
def test_kill_amid_pull(stores, fresh):
    url, target = f"file://{stores}/remote", stores / "target"
    push_datastore(stores / "grown", url)
    base = None if fresh else stores / "base"
    kill_until_done((pull_datastore, url, target), lambda: prepare(target, base), lambda: state(target), 2)


@pytest.mark.slow
def test_kill_amid_sync(stores, texts, tokenizer):
    target = stores / "target"
    sync_datastore(stores / "synced", [texts], tokenizer)
    (texts / "a.txt").unlink()
    (texts / "b.txt").write_text("this one changed altogether")
    (texts / "new.txt").write_text("this one is new")
    kill_until_done(
        (sync_datastore, target, [texts]), lambda: prepare(target, stores / "synced"), lambda: state(target), 3
    )
