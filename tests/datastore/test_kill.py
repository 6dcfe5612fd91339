"""SIGKILL at random moments: afterwards there is the old store, the new one, or a refusal; then all can be done."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

import children
import numpy as np
import pytest
from byte_tokenizers import byte_tokenizer
from test_build import contents

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore import sources
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.edit import (
    compact_datastore,
    merge_datastores,
    remove_documents,
    retokenize_datastore,
)
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.verify import verify_datastore
from retrieve_spec.errors import BuildError, StoreIncompleteError, StoreNotFoundError

VERBS = ("build", "add", "remove", "compact", "merge", "retokenize")
KILLS = int(os.environ.get("RETRIEVE_SPEC_KILLS", "12"))
"""Per verb."""


def attempt(change):
    sources.SHARD_BYTES = 60  # of this process: several shards, so that some can be done and others not
    change()


def run(change, kill_after=None):
    """Run a change in a child process, killed after some seconds; says whether it was killed before its end."""
    return children.run(attempt, change, kill_after=kill_after)


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
def verbs(tokenizer, texts, records, folder):
    """For each verb: the store it starts from (or None), and the change."""
    config = StoreConfig(segment_tokens=90)
    target, base, grown = (folder / name for name in ("target", "base", "grown"))
    answers = Source(str(records), field="output")
    build_datastore(base, str(texts), tokenizer, config=config)
    shutil.copytree(base, grown)
    add_documents(grown, answers)
    remove_documents(grown, ["c.py"])

    other = byte_tokenizer(offset=300)
    changes = (
        (None, partial(build_datastore, target, [str(texts), answers], tokenizer, config=config, workers=2)),
        (base, partial(add_documents, target, answers, workers=2)),
        (grown, partial(remove, target)),
        (grown, partial(compact_datastore, target)),
        (None, partial(merge_datastores, target, [base, grown])),
        (grown, partial(retokenize_datastore, target, other, workers=2)),
    )
    return target, dict(zip(VERBS, changes, strict=True))


def prepare(target, base):
    shutil.rmtree(target, ignore_errors=True)
    if base is not None:
        shutil.copytree(base, target)


def state(target):
    """Tokenizer and documents of a sound store, or None where the folder is refused."""
    try:
        store = open_datastore(target)
    except StoreNotFoundError:
        return None
    except StoreIncompleteError as error:
        return None if "again" in error.remedy else error
    verify_datastore(target)
    return store.fingerprint, contents(target)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_kill_at_any_moment(verbs, verb):
    target, (base, change) = verbs[0], verbs[1][verb]
    prepare(target, base)
    old = state(target)
    children.run(os.getpid)  # the server that starts children is slow once
    started = time.perf_counter()
    run(change)
    duration = time.perf_counter() - started
    new = state(target)

    def again(kill_after=None):
        if base is not None or state(target) is None:  # a store that is finished is not built again
            run(change, kill_after)

    random = np.random.default_rng(VERBS.index(verb))
    kills = trial = 0
    while kills < KILLS:
        prepare(target, base)
        trial += 1
        if run(change, float(random.uniform(0, duration))):
            kills += 1
        else:
            duration *= 0.8  # it took less time than the first run
        assert state(target) in (old, new)
        if trial % 4 == 0:  # what is done again may be killed again
            again(float(random.uniform(0, duration)))
            assert state(target) in (old, new)
        again()
        assert state(target) == new
        if base is not None and verb != "remove":  # these may leave notes, which the next change throws away
            assert not (target / "work").exists()
