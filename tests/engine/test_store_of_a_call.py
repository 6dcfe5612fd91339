"""A store that one call names is drafted from in that call alone, and changes no text."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import retrieve_spec as rs
from retrieve_spec import errors

OPTIONS: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False}
PROMPTS = ("def area(width, height):\n", "class Shelf:\n    def ")


@pytest.fixture(scope="module")
def answers(_reference: Any, reference_tokenizer: Any) -> list[str]:
    """What the model says anyway."""
    said = []
    for prompt in PROMPTS:
        ids = reference_tokenizer(prompt, return_tensors="pt")["input_ids"]
        text = _reference.model.generate(ids, **OPTIONS)[0, ids.shape[1] :]
        said.append(reference_tokenizer.decode(text, skip_special_tokens=True))
    return said


@pytest.fixture(scope="module")
def stores(answers: list[str], reference_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """For each prompt a store that holds its answer."""
    made = []
    for number, answer in enumerate(answers):
        folder = tmp_path_factory.mktemp(f"store{number}")
        (folder / "a.txt").write_text(PROMPTS[number] + answer)
        rs.build_datastore(folder / "store", [str(folder / "a.txt")], reference_tokenizer)
        made.append(folder / "store")
    return made


@pytest.fixture
def model(reference_model: Any, reference_tokenizer: Any) -> Any:
    rs.accelerate(reference_model, reference_tokenizer, nodes=16)
    return reference_model


def looked_up(report: rs.GenerationReport) -> int:
    return sum(report.accepted_by_source.get(source, 0) for source in ("exact", "ngram"))


def test_each_call_drafts_from_its_own(model: Any, reference_tokenizer: Any, stores: list[Path]) -> None:
    ids = reference_tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    without = model.generate(ids, **OPTIONS)
    assert looked_up(model.speculation.last) == 0
    for store in (stores[0], str(stores[0]), rs.open_datastore(stores[0]), [stores[1], stores[0]]):
        assert torch.equal(model.generate(ids, **OPTIONS, store=store), without)
        assert looked_up(model.speculation.last) > 20
    assert torch.equal(model.generate(ids, **OPTIONS, store=stores[0], draft="rest"), without)
    assert looked_up(model.speculation.last) > 20
    assert torch.equal(model.generate(ids, **OPTIONS), without)
    assert looked_up(model.speculation.last) == 0, "what the store held is gone"
    sampled = {**OPTIONS, "do_sample": True, "temperature": 0.5, "seed": 1, "num_return_sequences": 2}
    assert torch.equal(model.generate(ids, **sampled, store=stores[0]), model.generate(ids, **sampled, draft="off"))


def test_requests_streams_and_threads_at_once(
    model: Any, stores: list[Path], answers: list[str], reference_tokenizer: Any
) -> None:
    requests: list[Any] = [{"inputs": prompt, "store": store} for prompt in PROMPTS for store in (*stores, None)]
    done = list(rs.generate_many(model, requests, **OPTIONS))
    assert [one.error for one in done] == [None] * 6
    assert [one.text for one in done] == [answers[0]] * 3 + [answers[1]] * 3
    found = [looked_up(one.outputs[0].report) for one in done]
    assert found[0] > 20 and found[4] > 20 and found[2] == found[5] == 0
    assert max(found[1], found[3]) < 10, "the other's store"

    def ask(store: Path | None) -> int:
        stream = rs.generate_stream(model, PROMPTS[0], **OPTIONS, store=store)
        assert "".join(piece.text for piece in stream) == answers[0]
        return looked_up(stream.report)

    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(ask, [stores[0], None] * 4))
    assert all(count > 20 for count in counts[::2]) and not any(counts[1::2])


def test_what_is_no_store_is_an_error_and_the_model_goes_on(
    model: Any, reference_tokenizer: Any, stores: list[Path], tmp_path: Path
) -> None:
    ids = reference_tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    with pytest.raises(errors.StoreError):
        model.generate(ids, **OPTIONS, store=tmp_path)
    with pytest.raises(errors.ConfigError):
        model.generate(ids, **OPTIONS, store=7)
    (done,) = rs.generate_many(model, [{"inputs": PROMPTS[0], "store": tmp_path}], **OPTIONS)
    assert isinstance(done.error, errors.StoreError)
    model.generate(ids, **OPTIONS, store=stores[0])
    assert looked_up(model.speculation.last) > 20
