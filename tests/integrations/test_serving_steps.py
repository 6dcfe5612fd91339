"""Steps over texts that an engine keeps: the same as giving tokens to each request and asking for drafts."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_model import repeating_texts
from number_tokens import number_tokenizer

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.datastore.build import create_datastore
from retrieve_spec.datastore.distilled import add_distilled
from retrieve_spec.datastore.observations import Observations
from retrieve_spec.datastore.state_rows import KeyTransform, StateCollector
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.drafting.batch import RequestDiverged, SeenPass
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.tree import NO_DRAFT
from retrieve_spec.errors import ConfigError, RequestError
from retrieve_spec.integrations import ServingDrafter
from retrieve_spec.sources import RECYCLING, STATES

LONGEST = 160
CIRCLE = np.tile(np.arange(9, dtype=np.int32), 400)[None]
"""One text that goes round and round."""


class Engine:
    """An engine that verifies drafts: `by` says whether they come from `step`, or from `feed` and `draft`."""

    def __init__(self, written, begins, by, **options):
        self.drafter, self.by, self.written = ServingDrafter(**options), by, written
        self.lengths = np.array(begins, np.int32)
        self.drafts: dict[int, list[int]] = {}  # of the last step; those of rows that it left out are dropped
        for i, begin in enumerate(begins):
            self.drafter.start(f"r{i}", written[i, :begin], sampled=i % 3 == 2)

    def step(self, rows, most=24, longest=150, jump=0):
        """Verify the last drafts of these rows, or take in `jump` tokens; the others' drafts are dropped."""
        for i in rows:
            at, draft = int(self.lengths[i]), self.drafts.get(i, [])
            wrong = np.flatnonzero(self.written[i, at : at + len(draft)] != draft)
            taken = jump or (int(wrong[0]) if len(wrong) else len(draft)) + 1
            if self.by == "feed":
                verified = None if i in self.drafts else 0
                self.drafter.feed(f"r{i}", self.written[i, at : at + taken], verified=verified)
            self.lengths[i] += taken
        names = [f"r{i}" for i in rows]
        if self.by == "feed":
            room = [min(most, longest - int(self.lengths[i]) - 1) for i in rows]
            found = [tree.token_ids.tolist() for tree in self.drafter.draft(names, room)]
        else:
            found = self.drafter.step(names, self.written, self.lengths, rows, [longest] * len(rows), most)
        self.drafts = dict(zip(rows, found, strict=True))
        return found


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 5), st.booleans(), st.booleans())
def test_steps_are_feeding_and_drafting(seed, rows, measures, remembers):
    rng = np.random.default_rng(seed)
    written, begins = repeating_texts(rng, rows, LONGEST), rng.integers(1, 30, rows).tolist()
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
    counts, known = ours.statistics(), theirs.statistics()
    for name in ("rows", "drafted", "requests", "under_way"):
        assert counts[name] == known[name]
    for i in range(rows):
        assert measures or ours.length(f"r{i}") == engines[0].lengths[i] == theirs.length(f"r{i}")
        ours.finish(f"r{i}")
        theirs.finish(f"r{i}")
    if remembers and not measures:
        assert [t.tolist() for t in ours.session.texts] == [t.tolist() for t in theirs.session.texts]


def told(rng, text, at, drafted):
    """What a model says after a text's token before `at` and after each of so many drafted ones: often the next."""
    ids = np.stack([rng.permutation(10)[:8] for _ in range(drafted + 1)]).astype(np.int32) + text[0] // 100 * 100
    ids[:, 0] = text[at : at + drafted + 1]
    logits = -np.sort(rng.exponential(2, (drafted + 1, 8)).astype(np.float32))
    return SeenPass(ids, logits, rng.normal(size=(drafted + 1, 6)).astype(np.float32))


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """A store that has rows of hidden states."""
    rng = np.random.default_rng(5)
    ids, probs = rng.integers(0, 8, (300, 8)).astype(np.int32), np.full((300, 8), 0.125, np.float16)
    collector = StateCollector(KeyTransform(np.zeros(6, np.float32), np.eye(6, dtype=np.float32)))
    collector.add(ids[:, 0], rng.normal(size=(300, 6)).astype(np.float32), np.roll(ids, -1, 0), probs)
    folder = tmp_path_factory.mktemp("store")
    create_datastore(folder, number_tokenizer())
    add_distilled(Observations(ids[:, 0], np.array([300]), ids, probs), 1 << 10, folder, "model:1", collector.rows())
    return open_datastore(folder)


@pytest.mark.parametrize(("seed", "rows", "known"), [(0, 1, "all"), (1, 3, "all"), (2, 3, "changed"), (3, 2, "none")])
def test_what_the_model_said_is_learned_as_by_a_drafter_of_each_row(states, seed, rows, known):
    """Its top tokens and hidden states; rows of a pass that verified something else are left out."""
    rng = np.random.default_rng(seed)
    written, calibration, names = repeating_texts(rng, rows, LONGEST), Calibration(), [f"r{i}" for i in range(rows)]
    serving = ServingDrafter(datastores=[states], recycling=True)
    twins = [MixtureDrafter(serving.config, datastores=[states], calibration=calibration) for _ in names]
    lengths, trees = np.full(rows, 20, np.int32), [NO_DRAFT] * rows
    for i, twin in enumerate(twins):
        serving.start(names[i], written[i, :20])
        twin.start(written[i, :20])
        twin.draft(Budget(0, 0))
    credited = set()
    while lengths.max() < 130:
        said = [told(rng, written[i], int(lengths[i]), len(tree)) for i, tree in enumerate(trees)]
        hides = known == "none" or (known == "changed" and rng.random() < 0.3)
        for i, (twin, tree) in enumerate(zip(twins, trees, strict=True)):
            path = tree.path_along(written[i, lengths[i] :])
            emitted = written[i, lengths[i] : lengths[i] + len(path) + 1]
            lengths[i] += len(emitted)
            twin.observe(VerifiedPass(tree, path, emitted, *((None,) * 3 if hides else said[i])))
            trees[i] = twin.draft(Budget(12, 12), chain=True)
            credited.update(trees[i].source.tolist())
        joined = SeenPass(*(np.concatenate(parts) for parts in zip(*said, strict=True)))
        given = SeenPass(*(part[1:] for part in joined)) if known == "changed" and hides else joined
        seen = None if known == "none" else lambda given=given: given
        found = serving.step(names, written, lengths, list(range(rows)), [LONGEST] * rows, 12, seen)
        assert found == [tree.token_ids.tolist() for tree in trees]
    assert known == "none" or {RECYCLING, STATES} <= credited


@pytest.mark.parametrize("jump", [100, 4000])
def test_a_text_that_outgrows_its_arrays_is_drafted_for_as_by_feeding(jump, tmp_path):
    """Two texts of one calibration grow their automata in the same step; the second learns behind the first's draft."""
    written = np.random.default_rng(3).integers(0, 40, (2, 12400)).astype(np.int32)
    engines = [Engine(written, [2000, 2000], by, state=tmp_path / by) for by in ("step", "feed")]
    for _ in range(42 if jump == 100 else 2):
        one, other = (engine.step([0, 1], 8, 12400, jump) for engine in engines)
        assert one == other
    for engine in engines:
        engine.drafter.save()
    np.testing.assert_allclose(*(np.load(tmp_path / by / "greedy.npy") for by in ("step", "feed")), rtol=1e-6)


def test_a_text_that_does_not_go_on_is_said_and_nothing_is_done():
    written = repeating_texts(np.random.default_rng(0), 2, LONGEST)
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


def test_no_more_is_drafted_than_the_text_may_have():
    drafter = ServingDrafter()
    drafter.start("a", CIRCLE[0, :40])
    for longest, drafted in ((60, 16), (50, 8), (43, 1), (42, 0), (41, 0), (0, 0)):
        [draft] = drafter.step(["a"], CIRCLE, np.array([41], np.int32), [0], [longest], 16)
        assert len(draft) == drafted


def test_requests_that_were_given_tokens_otherwise():
    drafter = ServingDrafter()
    drafter.start("a", CIRCLE[0, :30])
    drafter.feed("a", CIRCLE[0, 30:33])
    [draft] = drafter.step(["a"], CIRCLE, np.array([40], np.int32), [0], [90], 4)
    assert draft == CIRCLE[0, 40:44].tolist() and drafter.step([], CIRCLE, np.array([], np.int32), [], [], 4) == []
    drafter.feed("a", CIRCLE[0, 40:42])
    assert drafter.draft(["a"], 3)[0].token_ids.tolist() == CIRCLE[0, 42:45].tolist()
    again = ["a"], CIRCLE, np.array([42], np.int32), [0], [90], 4
    drafter.step(*again)
    drafter.abandon()
    with pytest.raises(RequestError):
        drafter.step(*again)


def test_arrays_of_another_kind_are_refused():
    text, lengths = np.tile(np.arange(9, dtype=np.int32), (2, 10)), np.array([40, 40], np.int32)
    drafter = ServingDrafter()
    drafter.start("a", text[0, :30])
    for wrong in (
        (text.astype(np.int64), lengths, [0], [90]),
        (text[:, ::2], lengths, [0], [90]),
        (text[0], lengths, [0], [90]),
        (text, lengths.astype(np.int64), [0], [90]),
        (text, lengths + 51, [0], [90]),
        (text, lengths, [2], [90]),
        (text, lengths, [-1], [90]),
        (text, lengths, [0], []),
    ):
        with pytest.raises(ConfigError):
            drafter.step(["a"], *wrong, 4)
    assert drafter.step(["a"], text, lengths, [1], [90], 4) == [text[1, 40:44].tolist()]


@pytest.mark.parametrize("wrong", ["few states", "few logits", "narrow logits", "half logits", "gaps", "one state"])
def test_what_was_seen_is_refused_if_its_arrays_do_not_fit_each_other(states, wrong):
    """The kernel would read past the end of one of them."""
    drafter = ServingDrafter(datastores=[states], recycling=True)
    drafter.start("a", CIRCLE[0, :30])
    [draft] = drafter.step(["a"], CIRCLE, np.array([31], np.int32), [0], [90], 4)
    rows = len(draft) + 1
    ids, logits, hidden = (
        np.zeros((rows, 8), np.int32),
        np.zeros((rows, 8), np.float32),
        np.zeros((rows, 6), np.float32),
    )
    seen = {
        "few states": SeenPass(ids, logits, hidden[:1]),
        "few logits": SeenPass(ids, logits[:1], hidden),
        "narrow logits": SeenPass(ids, np.zeros((rows, 2), np.float32), hidden),
        "half logits": SeenPass(ids, logits.astype(np.float16), hidden),
        "gaps": SeenPass(np.zeros((rows, 16), np.int32)[:, ::2], logits, hidden),
        "one state": SeenPass(ids, logits, hidden[0]),
    }[wrong]
    lengths = np.array([31 + rows], np.int32)
    with pytest.raises(ConfigError, match="states of the same rows"):
        drafter.step(["a"], CIRCLE, lengths, [0], [90], 4, lambda: seen)
    assert drafter.length("a") == 31
    fits = SeenPass(ids, logits, hidden)
    assert drafter.step(["a"], CIRCLE, lengths, [0], [90], 4, lambda: fits) == [CIRCLE[0, 36:40].tolist()]


@pytest.mark.threads
def test_others_go_on_while_long_prompts_are_taken_in():
    drafter = ServingDrafter(SpeculationConfig(session=True))
    drafter.start("short", CIRCLE[0, :40])
    long = np.random.default_rng(2).integers(0, 3000, 60_000).astype(np.int32)

    def begin():
        for i in range(3):
            drafter.start(f"long{i}", long)
            drafter.finish(f"long{i}", keep=False)

    with ThreadPoolExecutor(1) as other:
        begun = other.submit(begin)
        for length in range(41, 900):
            [draft] = drafter.step(["short"], CIRCLE, np.array([length], np.int32), [0], [3600], 4)
            assert draft == CIRCLE[0, length : length + 4].tolist()
        begun.result()
    assert list(drafter) == ["short"]
