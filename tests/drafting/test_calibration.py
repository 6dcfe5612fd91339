import logging
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from retrieve_spec.drafting.calibration import Calibration, calibration_for, put_array
from retrieve_spec.drafting.mixture import MixtureDrafter


def learned(path=None):
    calibration = Calibration(path)
    rng = np.random.default_rng(0)
    calibration.cells[:] = rng.gamma(1, 5, calibration.cells.shape)
    calibration.scale[:] = rng.gamma(1, 5, calibration.scale.shape)
    calibration.drafts[:] = rng.gamma(1, 5, (2, 2)).astype(np.float32)
    return calibration


def same(a, b):
    tables = ((a.cells, b.cells), (a.scale, b.scale), (a.drafts, b.drafts))
    return all(np.array_equal(one, other) for one, other in tables)


def test_what_was_learned_comes_back(tmp_path):
    path = tmp_path / "kept.npy"
    assert not Calibration(path).cells.any(), "there is no file yet"
    calibration = learned()
    calibration.save(path)
    assert same(Calibration(path), calibration)
    assert os.listdir(tmp_path) == ["kept.npy"]


def test_a_drafter_keeps_it_and_starts_warm(tmp_path, run, markov_text):
    path = tmp_path / "kept.npy"
    text = markov_text(1, 800)
    run(MixtureDrafter(calibration=Calibration(path))).request(text[:100], text[100:])
    warm = Calibration(path)
    assert warm.cells.any() and warm.scale.any()


DAMAGED = {
    "empty": lambda whole, flat: b"",
    "text": lambda whole, flat: b"[1, 2, 3]",
    "cut": lambda whole, flat: whole[:-7],
    "longer": lambda whole, flat: np.concatenate([flat, flat]),
    "other type": lambda whole, flat: flat.astype(np.float64),
    "nan": lambda whole, flat: np.append(flat[1:], np.float32(np.nan)),
    "negative": lambda whole, flat: np.append(flat[1:], np.float32(-1)),
    "pickle": lambda whole, flat: np.array([{}], object),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_learned_anew(tmp_path, caplog, damage):
    path = tmp_path / "kept.npy"
    learned().save(path)
    content = DAMAGED[damage](path.read_bytes(), np.load(path))
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content, allow_pickle=True)
    calibration = Calibration(path)
    assert "weights start anew" in caplog.text
    assert not calibration.cells.any() and not path.exists()


def test_a_full_disk_does_not_end_a_generation(tmp_path, monkeypatch, caplog):
    path = tmp_path / "kept.npy"
    learned().save(path)
    before = path.read_bytes()

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with caplog.at_level(logging.WARNING):
        Calibration(path).keep()
    assert "No space left" in caplog.text
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["kept.npy"], "no half-written file stays"


def test_threads_that_write_at_once_leave_a_whole_file(tmp_path):
    path, arrays = tmp_path / "kept.npy", [np.full(200_000, number) for number in (1, 2)]
    put_array(path, arrays[0])
    with ThreadPoolExecutor(2) as writers:
        writing = [writers.submit(lambda a=array: [put_array(path, a) for _ in range(50)]) for array in arrays]
        while not all(each.done() for each in writing):
            assert len(set(np.load(path)[[0, 100_000, -1]])) == 1
    assert os.listdir(tmp_path) == ["kept.npy"]


def test_beside_the_first_writable_store(tmp_path):
    stores = [SimpleNamespace(calibration_path=lambda _key: None)]
    assert calibration_for(stores, "m").path is None
    assert calibration_for([], "m").path is None
    stores.append(SimpleNamespace(calibration_path=lambda key: tmp_path / f"{key}.npy"))
    assert calibration_for(stores, "m").path == tmp_path / "m.npy"
