"""SIGKILL at random moments: afterwards there is what was, what will be, or a refusal; then all can be done."""

import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import children
import numpy as np
import pytest
from byte_tokenizers import byte_tokenizer
from dense_models import save_model
from test_build import contents

from retrieve_spec.config import DenseConfig, StoreConfig
from retrieve_spec.datastore import sources
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.edit import (
    compact_datastore,
    merge_datastores,
    remove_documents,
    retokenize_datastore,
)
from retrieve_spec.datastore.inspection import verify_datastore
from retrieve_spec.datastore.share import pull_datastore, push_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.sync import sync_datastore
from retrieve_spec.errors import BuildError, StoreIncompleteError, StoreNotFoundError

CONFIG = StoreConfig(segment_tokens=90)
KILLS = int(os.environ.get("RETRIEVE_SPEC_KILLS", "12"))
"""Per verb."""
FULL = 7


def attempt(change):
    sources.SHARD_BYTES = 60  # of this process: several shards, so that some can be done and others not
    change()


def remove(target):
    try:
        remove_documents(target, ["*.txt"])
    except BuildError as error:
        if "documents that match" not in str(error) or contents(target).keys() & {"a.txt", "b.txt"}:
            raise


@pytest.fixture
def folder(tmp_path):
    """A folder in memory where there is one: what a kill leaves does not depend on the disk, the time it takes does."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def stores(tokenizer, texts, records, folder):
    """A store, and the same with more and less in it."""
    build_datastore(folder / "base", str(texts), tokenizer, config=CONFIG)
    shutil.copytree(folder / "base", folder / "grown")
    add_documents(folder / "grown", Source(str(records), field="output"))
    remove_documents(folder / "grown", ["c.py"])
    return folder


def prepare(target, base):
    shutil.rmtree(target, ignore_errors=True)
    if base is not None:
        shutil.copytree(base, target)


def state(target):
    """Tokenizer, documents and dense keys of a sound store, or None where the folder is refused."""
    try:
        store = open_datastore(target)
    except StoreNotFoundError:
        return None
    except StoreIncompleteError as error:
        return None if "again" in error.remedy else error
    verify_datastore(target)
    keys = {path.relative_to(target): path.read_bytes() for path in sorted(target.glob("segments/*/dense_*"))}
    return store.fingerprint, contents(target), keys


def kill_until_done(change, prepared, told, seed, tidy=Path("no such place")):
    """Kill a change at random moments of it; done again, which may be killed too, it is done and has cleared up."""
    prepared()
    old = told()
    children.run(os.getpid)  # the server that starts children is slow once
    started = time.perf_counter()
    children.run(attempt, change)
    duration = time.perf_counter() - started
    new = told()
    assert new != old

    def again(kill_after=None):
        if old is not None or told() is None:  # a store that is finished is not built again
            children.run(attempt, change, kill_after=kill_after)

    random = np.random.default_rng(seed)
    kills = trial = 0
    while kills < KILLS:
        prepared()
        trial += 1
        if children.run(attempt, change, kill_after=float(random.uniform(0, duration))):
            kills += 1
        else:
            duration *= 0.8  # it took less time than the first run
        assert told() in (old, new)
        if trial % 4 == 0:
            again(float(random.uniform(0, duration)))
            assert told() in (old, new)
        again()
        assert told() == new
        assert not tidy.exists()


VERBS = ("build", "dense", "add", "remove", "compact", "merge", "retokenize", "sync", "pull", "pull into")


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_kill_at_any_moment(stores, texts, records, tokenizer, verb):
    target, base, grown = (stores / name for name in ("target", "base", "grown"))
    answers, url = Source(str(records), field="output"), f"file://{stores}/remote"
    dense = DenseConfig(save_model(stores / "model"), dims=4, window=16, overlap=4)
    push_datastore(grown, url)
    (texts / "b.txt").write_text("this one changed altogether")
    (texts / "a.txt").rename(texts / "new.txt")
    before, change = {
        "build": (None, partial(build_datastore, target, [str(texts), answers], tokenizer, config=CONFIG, workers=2)),
        "dense": (None, partial(build_datastore, target, str(texts), tokenizer, config=replace(CONFIG, dense=dense))),
        "add": (base, partial(add_documents, target, answers, workers=2)),
        "remove": (grown, partial(remove, target)),
        "compact": (grown, partial(compact_datastore, target)),
        "merge": (None, partial(merge_datastores, target, [base, grown])),
        "retokenize": (grown, partial(retokenize_datastore, target, byte_tokenizer(offset=300), workers=2)),
        "sync": (base, partial(sync_datastore, target, [texts])),
        "pull": (None, partial(pull_datastore, url, target)),
        "pull into": (base, partial(pull_datastore, url, target)),
    }[verb]
    told, number = (lambda: state(target)), VERBS.index(verb)
    if verb == "compact":  # it leaves the documents that there are
        told = lambda: (state(target), sorted(path.name for path in target.glob("tombstones/*")))  # noqa: E731
    tidy = {"tidy": target / "work"} if verb in ("add", "compact", "retokenize") else {}
    kill_until_done(change, lambda: prepare(target, before), told, number, **tidy)


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [True, False])
def test_kill_amid_push(stores, fresh):
    url, remote, seen = f"file://{stores}/remote", stores / "remote", stores / "seen"
    push_datastore(stores / "base", url)
    shutil.copytree(stores / "base", stores / "sent")

    def prepared():
        prepare(remote, None)
        prepare(stores / "from", stores / "grown")
        if not fresh:
            push_datastore(stores / "sent", url)
            shutil.copyfile(stores / "sent" / "remotes.json", stores / "from" / "remotes.json")

    def told():
        """What a pull brings, None where nothing was ever pushed whole."""
        prepare(seen, None)
        try:
            pull_datastore(url, seen)
        except StoreNotFoundError:
            return None
        return state(seen)

    kill_until_done(partial(push_datastore, stores / "from", url), prepared, told, 1)


def with_limit(limit, build):
    """Build on a full disk; exits with FULL after a `BuildError`."""
    children.limit_files(limit)
    try:
        build(workers=1)
    except BuildError as error:
        sys.exit(FULL if error.expected.startswith("to write to") else 98)


@pytest.mark.slow
def test_no_room_at_any_point(texts, tokenizer, tmp_path):
    dense = DenseConfig(save_model(tmp_path / "model"), dims=4, window=16, overlap=4)
    build = partial(build_datastore, tmp_path / "s", str(texts), tokenizer, config=replace(CONFIG, dense=dense))
    build()
    whole = state(tmp_path / "s")
    sizes = sorted({path.stat().st_size for path in (tmp_path / "s").rglob("*") if path.is_file()})
    outcomes = set()
    for limit in [0, *(size - 1 for size in sizes if size), sizes[-1]]:
        prepare(tmp_path / "s", None)
        outcomes.add(outcome := children.exit_code(children.start(with_limit, limit, build)))
        assert state(tmp_path / "s") == (None if outcome else whole), limit
        if outcome:
            build()
            assert state(tmp_path / "s") == whole
    assert outcomes == {FULL, 0}
