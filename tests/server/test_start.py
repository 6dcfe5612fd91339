"""What is wrong with a command line of `serve` is said before the model loads."""

from __future__ import annotations

import pytest

from retrieve_spec.config import ServeConfig
from retrieve_spec.errors import StoreNotFoundError
from retrieve_spec.server import run


def test_a_folder_that_is_no_store_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "build_service", lambda *_, **__: pytest.fail("loaded a model"))
    with pytest.raises(StoreNotFoundError, match=r"no manifest\.json"):
        run.serve("reference", ServeConfig(port=0), stores=[tmp_path])
