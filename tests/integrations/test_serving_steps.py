"""Steps over texts that an engine keeps: the same as giving tokens to each request and asking for drafts."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.drafting.batch import RequestDiverged
from retrieve_spec.errors import ConfigError
from retrieve_spec.integrations import ServingDrafter

LONGEST = 160


def texts(rng, rows, length=150):
    """Random texts over a few tokens that repeat themselves."""
    made = np.zeros((rows, LONGEST), np.int32)
    for row in range(rows):
        made[row, :length] = rng.integers(0, int(rng.integers(2, 8)), length) + 50 * row
        made[row, 70:110] = made[row, 20:60]
    return made


class Engine:
    """An engine that verifies drafts: `by` says whether they come from `step`, or from `feed` and `draft`."""

    def __init__(self, written, begins, by, **options):
        self.drafter, self.by, self.written = ServingDrafter(**options), by, written
        self.lengths, self.drafts = np.array(begins, np.int32), [[] for _ in begins]
        self.dropped: set[int] = set()
        for i, begin in enumerate(begins):
            self.drafter.start(f"r{i}", written[i, :begin], sampled=i % 3 == 2)

    def step(self, rows, most=24, longest=150):
        """Verify the last drafts of these rows; the others are left out, and theirs dropped."""
        for i in range(len(self.lengths)):
            at = int(self.lengths[i])
            if i in rows:
                draft = self.drafts[i]
                wanted = self.written[i, at : at + len(draft)].tolist()
                right = next((j for j, (a, b) in enumerate(zip(wanted, draft, strict=True)) if a != b), len(draft))
                if self.by == "feed":
                    verified = 0 if i in self.dropped else None
                    self.drafter.feed(f"r{i}", self.written[i, at : at + right + 1], verified=verified)
                self.lengths[i] += right + 1
                self.dropped.discard(i)
            else:
                self.dropped.add(i)
            self.drafts[i] = []
        names = [f"r{i}" for i in rows]
        if self.by == "feed":
            room = [min(most, longest - int(self.lengths[i]) - 1) for i in rows]
            found = [tree.token_ids.tolist() for tree in self.drafter.draft(names, room)]
        else:
            found = self.drafter.step(names, self.written, self.lengths, rows, [longest] * len(rows), most)
        for i, draft in zip(rows, found, strict=True):
            self.drafts[i] = draft
        return found


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 5), st.booleans(), st.booleans())
def test_steps_are_feeding_and_drafting(seed, rows, measures, remembers):
    rng = np.random.default_rng(seed)
    written, begins = texts(rng, rows), rng.integers(1, 30, rows).tolist()
    engines = [Engine(written, begins, by, config=SpeculationConfig(session=remembers)) for by in ("step", "feed")]
    for _ in range(30):
        present = [i for i in range(rows) if engines[0].lengths[i] < 120 and (measures or rng.random() < 0.9)]
        if not present:
            continue
        one, other = (engine.step(present) for engine in engines)
        assert one == other
        if measures:
            for engine in engines:
                engine.drafter.measured(1.0 + 0.1 * sum(map(len, one)))
    ours, theirs = (engine.drafter for engine in engines)
    for kind, calibration in ours._calibrations.items():
        if not measures:  # what a step without a look verified is judged at the next look
            assert np.allclose(calibration.drafts, theirs._calibrations[kind].drafts, rtol=1e-5)
        assert measures or (calibration.cells == theirs._calibrations[kind].cells).all()
    counts, known = ours.statistics(), theirs.statistics()
    for name in ("rows", "drafted", "requests", "under_way"):
        assert counts[name] == known[name]
    for name in [f"r{i}" for i in range(rows)]:
        said = ours._requests[name].row.said.tolist()
        begin = begins[int(name[1])]
        assert said == written[int(name[1]), begin : begin + len(said)].tolist()
        assert measures or len(said) == engines[0].lengths[int(name[1])] - begin
        ours.finish(name)
        theirs.finish(name)
    if remembers and not measures:
        assert [t.tolist() for t in ours.session.texts] == [t.tolist() for t in theirs.session.texts]


def test_a_text_that_outgrows_its_arrays_is_drafted_for_as_by_feeding(tmp_path):
    """Two texts of one calibration grow their automata in the same step; the second learns behind the first's draft."""
    written = np.random.default_rng(3).integers(0, 40, (2, 6400)).astype(np.int32)
    drafts = {}
    for by in ("step", "feed"):
        engine = Engine(written, [2000, 2000], by, state=tmp_path / by)
        drafts[by] = []
        for length in range(2100, 6300, 100):
            for i in range(2):
                if by == "feed":
                    engine.drafter.feed(f"r{i}", written[i, engine.lengths[i] : length])
            engine.lengths[:] = length
            if by == "feed":
                found = [tree.token_ids.tolist() for tree in engine.drafter.draft(["r0", "r1"], 8)]
            else:
                found = engine.drafter.step(["r0", "r1"], written, engine.lengths, [0, 1], [6400, 6400], 8)
            drafts[by].append(found)
        engine.drafter.save()
    assert drafts["step"] == drafts["feed"]
    kept = [np.load(tmp_path / by / "greedy.npy") for by in ("step", "feed")]
    np.testing.assert_allclose(*kept, rtol=1e-6)


def test_a_draft_that_nobody_verified_is_not_judged(tmp_path):
    text = np.tile(np.arange(9, dtype=np.int32), 10)
    kept = []
    for name, drafts in (("drafted", True), ("not", False)):
        drafter = ServingDrafter(state=tmp_path / name)
        drafter.start("a", text[:40])
        if drafts:
            assert len(drafter.draft(["a"], 4)[0]) == 4
        drafter.feed("a", text[40:41], verified=0)
        drafter.follow()
        drafter.save()
        kept.append(np.load(tmp_path / name / "greedy.npy"))
    np.testing.assert_array_equal(*kept)


def test_a_text_that_does_not_go_on_is_said_and_nothing_is_done():
    written = texts(np.random.default_rng(0), 2)
    engine = Engine(written, [40, 40], "step")
    engine.step([0, 1])
    before = engine.drafter.statistics()["emitted"], [engine.drafter.length(name) for name in ("r0", "r1")]
    changed = written.copy()
    changed[1, 38] += 1
    with pytest.raises(RequestDiverged) as other:
        engine.drafter.step(["r0", "r1"], changed, engine.lengths + 3, [0, 1], [150, 150], 8)
    assert other.value.row == 1
    with pytest.raises(RequestDiverged):  # shorter than before
        engine.drafter.step(["r0"], written, engine.lengths - 3, [0], [150], 8)
    assert before == (engine.drafter.statistics()["emitted"], [engine.drafter.length(name) for name in ("r0", "r1")])
    engine.step([0, 1])


def test_more_tokens_than_there_was_room_for():
    rng = np.random.default_rng(1)
    written = rng.integers(0, 5000, (1, 30000)).astype(np.int32)
    written[0, 20000:] = written[0, :10000]
    drafter = ServingDrafter()
    drafter.start("a", written[0, :9])
    for length in (10, 4000, 5000, 20005):
        [draft] = drafter.step(["a"], written, np.array([length], np.int32), [0], [30000], 16)
    assert draft == written[0, 20005:20021].tolist() and drafter.length("a") == 20005
    assert drafter._requests["a"].row.said.tolist() == written[0, 9:20005].tolist()


def test_no_more_is_drafted_than_the_text_may_have():
    text = np.tile(np.arange(9, dtype=np.int32), 10)[None]
    drafter = ServingDrafter()
    drafter.start("a", text[0, :40])
    for longest, drafted in ((60, 16), (50, 8), (43, 1), (42, 0), (41, 0), (0, 0)):
        drafter._slots = None
        assert len(drafter.step(["a"], text, np.array([41], np.int32), [0], [longest], 16)[0]) == drafted


def test_requests_that_were_given_tokens_otherwise():
    text = np.tile(np.arange(9, dtype=np.int32), 10)[None]
    drafter = ServingDrafter()
    drafter.start("a", text[0, :30])
    drafter.feed("a", text[0, 30:33])
    [draft] = drafter.step(["a"], text, np.array([40], np.int32), [0], [90], 4)
    assert draft == text[0, 40:44].tolist() and drafter.step([], text, np.array([], np.int32), [], [], 4) == []
    drafter.feed("a", text[0, 40:42])
    assert drafter.draft(["a"], 3)[0].token_ids.tolist() == text[0, 42:45].tolist()


def test_arrays_of_another_kind_are_refused():
    text, lengths = np.tile(np.arange(9, dtype=np.int32), (2, 10)), np.array([40, 40], np.int32)
    drafter = ServingDrafter()
    drafter.start("a", text[0, :30])
    for wrong in (
        (text.astype(np.int64), lengths, [0], [90]),
        (text[:, ::2], lengths, [0], [90]),
        (text[0], lengths, [0], [90]),
        (text, lengths.astype(np.int64), [0], [90]),
        (text, lengths, [2], [90]),
        (text, lengths, [-1], [90]),
        (text, lengths, [0], []),
    ):
        with pytest.raises(ConfigError):
            drafter.step(["a"], *wrong, 4)
    assert drafter.step(["a"], text, lengths, [1], [90], 4) == [text[1, 40:44].tolist()]


def test_what_the_model_has_no_token_for_is_not_drafted():
    text = np.array([[1, 2, 3, 9, 1, 2, 3, 9, 1]], np.int32)
    drafter = ServingDrafter(vocabulary=6)
    drafter.start("a", text[0])
    assert drafter.step(["a"], text, np.array([9], np.int32), [0], [90], 8) == [[2, 3]]


@pytest.mark.threads
def test_others_go_on_while_long_prompts_are_taken_in():
    rng = np.random.default_rng(2)
    drafter = ServingDrafter(SpeculationConfig(session=True))
    text = np.tile(np.arange(9, dtype=np.int32), 400)[None]
    drafter.start("short", text[0, :40])
    long = rng.integers(0, 3000, 60_000).astype(np.int32)
    failed = []

    def begin():
        try:
            for i in range(3):
                drafter.start(f"long{i}", long)
                drafter.finish(f"long{i}", keep=False)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=begin)
    thread.start()
    for length in range(41, 900):
        [draft] = drafter.step(["short"], text, np.array([length], np.int32), [0], [3600], 4)
        assert draft == text[0, length : length + 4].tolist()
    thread.join()
    assert not failed and len(drafter) == 1


def test_requests_given_up_while_they_begin(monkeypatch):
    from retrieve_spec.integrations import requests

    drafter = ServingDrafter()
    start = requests.BatchRow.start

    def given_up(row, *prompt):
        start(row, *prompt)
        if len(prompt[0]):
            drafter.abandon()

    monkeypatch.setattr(requests.BatchRow, "start", given_up)
    drafter.start("a", [1, 2, 3])
    assert "a" not in drafter and not drafter._starting
    monkeypatch.undo()
    drafter.start("a", [1, 2, 3])
    assert "a" in drafter


def test_lengths_beyond_the_texts_are_refused():
    drafter = ServingDrafter()
    texts = np.tile(np.arange(9, dtype=np.int32), (2, 5))
    drafter.start("a", texts[0, :20])
    with pytest.raises(ConfigError, match="lengths up to 45"):
        drafter.step(["a"], texts, np.array([46, 45], np.int32), [0], [90], 4)


def test_drafters_at_rest_hold_no_automata_of_the_session():
    drafter = ServingDrafter(SpeculationConfig(session=True, session_tokens=300))
    rng = np.random.default_rng(0)
    alive = weakref.WeakSet()
    for at_once in (12, 6, 1, 1, 1):
        names = [str(i) for i in range(at_once)]
        for name in names:
            drafter.start(name, rng.integers(0, 999, 20).astype(np.int32))
            drafter.feed(name, rng.integers(0, 999, 100).astype(np.int32))
            alive.update(drafter.session.automata)
        for name in names:
            drafter.finish(name)
    gc.collect()
    assert set(alive) <= set(drafter.session.automata)
