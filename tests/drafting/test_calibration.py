import logging
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from retrieve_spec.drafting.calibration import Calibration, calibration_for, put_array


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


DAMAGED = {
    "empty": lambda whole, array: b"",
    "text": lambda whole, array: b"[1, 2, 3]",
    "cut": lambda whole, array: whole[:-7],
    "longer": lambda whole, array: np.concatenate([array, array]),
    "shorter": lambda whole, array: array[:3],
    "other type": lambda whole, array: array.astype(np.float64),
    "pickle": lambda whole, array: np.array([{}], object),
}
OF_WEIGHTS = {
    "nan": lambda whole, array: np.append(array[1:], np.float32(np.nan)),
    "negative": lambda whole, array: np.append(array[1:], np.float32(-1)),
}
OF_PHRASES = {
    "version": lambda whole, array: np.append(array[:1] + 1, array[1:]),
    "checksum": lambda whole, array: np.concatenate([array[:5], array[5:6] ^ 1, array[6:]]),
    "flipped": lambda whole, array: np.append(array[:-1], array[-1] ^ 1),
}


@pytest.mark.parametrize(
    ("what", "damage"),
    [(what, name) for what, own in (("weights", OF_WEIGHTS), ("phrases", OF_PHRASES)) for name in DAMAGED | own],
)
def test_a_damaged_file_is_learned_anew(tmp_path, caplog, what, damage):
    path = tmp_path / "kept.npy"
    calibration = learned(path)
    for _ in range(2):
        calibration.phrases.learn(np.array([1, 2, 3], np.int32))
    calibration.keep()
    damaged = path if what == "weights" else tmp_path / "kept.phrases.npy"
    content = (DAMAGED | OF_WEIGHTS | OF_PHRASES)[damage](damaged.read_bytes(), np.load(damaged))
    damaged.write_bytes(content) if isinstance(content, bytes) else np.save(damaged, content, allow_pickle=True)
    read = Calibration(path)
    assert f"{what} start anew" in caplog.text
    assert not damaged.exists() and len(os.listdir(tmp_path)) == 1
    assert (read.cells.any(), read.phrases.sets.any()) == (what != "weights", what != "phrases")


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
