"""Stores on the Hugging Face Hub (a stand-in): pushed, added to, verified, pulled."""

import pytest
from fake_hub import hub
from huggingface_hub import HfFileSystem, constants
from test_build import contents

from retrieve_spec.datastore.build import add_documents
from retrieve_spec.datastore.inspection import verify_datastore
from retrieve_spec.datastore.share import pull_datastore, push_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.errors import StoreLockedError, StoreNotFoundError


@pytest.fixture
def url(monkeypatch, tmp_path):
    with hub() as place:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, place)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", place)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "nobody's")
        HfFileSystem.clear_instance_cache()
        yield "hf://datasets/me/repo/store"
        HfFileSystem.clear_instance_cache()


def test_a_store_on_the_hub(store, url, records, tmp_path):
    with pytest.raises(StoreNotFoundError):
        pull_datastore(url, tmp_path / "t")
    push_datastore(store, url)
    source = Source(str(records), field="output")
    pull_datastore(url, tmp_path / "t")
    assert add_documents(tmp_path / "t", source, workers=1).documents == 5
    push_datastore(tmp_path / "t", url)
    verify_datastore(url)
    with pytest.raises(StoreLockedError, match="has not seen"):
        push_datastore(store, url)
    pull_datastore(url, tmp_path / "t")
    verify_datastore(tmp_path / "t")
    add_documents(store, source)
    assert contents(tmp_path / "t") == contents(store)
    assert push_datastore(store, url + "2").kept == 0
