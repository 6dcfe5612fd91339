"""Dense builds without room on the disk: a typed error, and the same keys in the end."""

from __future__ import annotations

import shutil
import sys
from functools import partial

import pytest
from children import exit_code, limit_files, start
from dense_models import save_model
from test_dense_kill import keys_of

from retrieve_spec.config import DenseConfig, StoreConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.verify import verify_datastore
from retrieve_spec.errors import BuildError, StoreIncompleteError, StoreNotFoundError

FULL = 7


@pytest.fixture
def build(tmp_path, texts, tokenizer):
    config = StoreConfig(dense=DenseConfig(save_model(tmp_path / "model"), dims=4, window=16, overlap=4))
    build = partial(build_datastore, sources=str(texts), tokenizer=tokenizer, config=config, workers=1)

    def call(name):
        build(tmp_path / name)
        return tmp_path / name

    call.limited = lambda limit: exit_code(start(with_limit, limit, build, tmp_path / "s"))
    return call


def with_limit(limit, build, path):
    """Build on a full disk; exits with FULL after a `BuildError`."""
    limit_files(limit)
    try:
        build(path)
    except BuildError as error:
        sys.exit(FULL if error.expected.startswith("to write to") else 98)


@pytest.mark.slow
def test_no_room_at_any_point(build, tmp_path):
    whole = build("whole")
    sizes = sorted({path.stat().st_size for path in whole.rglob("*") if path.is_file()})
    outcomes = set()
    for limit in [0, *(size - 1 for size in sizes if size), sizes[-1]]:
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
        outcome = build.limited(limit)
        outcomes.add(outcome)
        assert outcome in (FULL, 0), limit
        if outcome == 0:
            verify_datastore(tmp_path / "s")
        else:
            with pytest.raises((StoreNotFoundError, StoreIncompleteError)):
                open_datastore(tmp_path / "s")
            assert keys_of(build("s")) == keys_of(whole)
    assert outcomes == {FULL, 0}
