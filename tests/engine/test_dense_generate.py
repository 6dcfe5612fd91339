"""Stores with a dense index behind `generate`: same output, states of the layer the store keeps, whose they are."""

from typing import Any

import pytest
import torch
from batch_rows import small_model
from number_tokens import number_tokenizer
from transformers import PreTrainedTokenizerFast

import retrieve_spec as rs
from retrieve_spec.config import DenseConfig, StoreConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import MissingSourceError, ModelMismatchError

SIZE = 120


def random_model(layers: int = 3) -> Any:
    return small_model("llama", vocab_size=SIZE, num_hidden_layers=layers, bos_token_id=None)


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model()


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.tensor([[(i * 37 + 11) % SIZE for i in range(20)]])


@pytest.fixture(scope="module")
def stores(model, tmp_path_factory):
    """Stores of what the model says to some prompts, with keys of the last and of the second layer."""
    folder = tmp_path_factory.mktemp("dense")
    tokenizer = number_tokenizer(SIZE)
    model.save_pretrained(folder / "model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
    (folder / "texts").mkdir()
    for seed in range(6):
        torch.manual_seed(seed)
        start = torch.randint(0, SIZE, (1, 8)) if seed else torch.tensor([[(i * 37 + 11) % SIZE for i in range(20)]])
        said = model.generate(start, do_sample=False, max_new_tokens=80)[0].tolist()
        (folder / "texts" / f"{seed}.txt").write_text(" ".join(map(str, said)))
    found = {}
    for layer in ("last", 2):
        config = StoreConfig(index="exact", dense=DenseConfig(str(folder / "model"), layer=layer, dims=16))
        build_datastore(folder / f"store-{layer}", str(folder / "texts"), tokenizer, config=config)
        found[layer] = folder / f"store-{layer}"
    return found


@pytest.mark.parametrize("recorded_pass", ["off", "always"])
@pytest.mark.parametrize("layer", ["last", 2])
@pytest.mark.parametrize("draft", ["dresd", "auto"])
def test_output_stays_the_same_and_neighbours_are_found(model, prompt, stores, draft, layer, recorded_pass) -> None:
    expected = model.generate(prompt, do_sample=False, max_new_tokens=60)
    rs.accelerate(model, datastores=[stores[layer]], draft=draft, recorded_pass=recorded_pass)
    try:
        assert model.generate(prompt, do_sample=False, max_new_tokens=60, nodes=16).tolist() == expected.tolist()
        report = model.speculation.last
        assert report.tokens_per_pass > 4, "the store holds the answer"
        if draft == "dresd":
            assert set(report.accepted_by_source) == {"dense"}
        verifier = model.speculation._make_verifier()
        assert getattr(verifier, "recorded", None) is None or verifier.recorded.layer == layer
    finally:
        rs.restore(model)


def test_a_store_of_another_model_names_both_and_can_be_used_without_its_dense_index(prompt, stores) -> None:
    other = random_model(2)
    expected = other.generate(prompt, do_sample=False, max_new_tokens=20)
    with pytest.raises(ModelMismatchError, match="dense='off'"):
        rs.accelerate(other, datastores=[stores["last"]])
    assert not hasattr(other, "speculation")
    rs.accelerate(other, datastores=[stores["last"]], dense="off")
    assert other.speculation.drafter().wants_hidden is None
    assert other.generate(prompt, do_sample=False, max_new_tokens=20).tolist() == expected.tolist()
    with pytest.raises(MissingSourceError, match="dense index"):
        other.generate(prompt, draft="dresd")
    rs.restore(other)
    rs.accelerate(other)
    with pytest.raises(ModelMismatchError):
        other.speculation.use_datastores([open_datastore(stores["last"])])
    assert other.speculation.datastores == [], "nothing changed"
