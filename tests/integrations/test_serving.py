"""Drafts for many requests by name: those of a drafter for each, as many as pay, whoever calls when."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_model import distilled_store, repeating_texts

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.errors import ConfigError, PromptError, RequestError
from retrieve_spec.integrations import ServingDrafter, serving
from retrieve_spec.sources.session import SessionMemory

CONFIG = SpeculationConfig(min_path_probability=0.03)
PREPARED = """
from numba.core.caching import IndexDataCacheFile

from retrieve_spec.integrations import ServingDrafter

drafter = ServingDrafter()
drafter.prepare(["chain"])
loaded = []
load = IndexDataCacheFile.load
IndexDataCacheFile.load = lambda self, key: loaded.append(self._index_path) or load(self, key)
for name in ("a", "b"):
    drafter.start(name, [1, 2, 3, 4, 5, 6, 7] * 3)
for step in range(40):
    drafter.draft(["a", "b"][: 1 + step % 2], 8)
    drafter.measured(0.01)
    drafter.feed("a", [1 + step % 7])
drafter.finish("a")
assert not loaded, loaded
"""
NO_TORCH = '''
import sys


class Blocked:
    """Finds no model library."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "accelerate", "faiss", "vllm"):
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Blocked())

from retrieve_spec.integrations import ServingDrafter, serving

drafter = ServingDrafter()
drafter.start("a", [1, 2, 3, 4, 5, 6, 7] * 3)
[chain] = drafter.draft(["a"], 8)
assert chain.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 1], chain
drafter.finish("a")
assert not {"torch", "transformers"} & set(sys.modules)
'''


def texts(seed, rows, length=120):
    """Random texts over a few tokens, which repeat themselves; no two of them have a token in common."""
    return repeating_texts(np.random.default_rng(seed), rows, length)


def same(one, other):
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("token_ids", "parent", "log_p"))


class Twins:
    """The naive way: a drafter for each row, asked one after another, which share what a `ServingDrafter` shares."""

    def __init__(self, session=None, stores=()):
        self.calibration = Calibration()
        self.session, self.stores = session, stores
        self.drafters, self.trees = {}, {}

    def start(self, name, prompt, prediction=None):
        shared = {"session": self.session, "datastores": self.stores, "calibration": self.calibration}
        self.drafters[name] = MixtureDrafter(CONFIG, recycling=False, **shared)
        self.drafters[name].start(prompt, prediction)

    def feed(self, name, emitted):
        tree = self.trees.pop(name)
        self.drafters[name].observe(VerifiedPass(tree, tree.path_along(emitted), emitted))

    def draft(self, names, nodes, depth):
        for name in names:
            self.trees[name] = self.drafters[name].propose(Budget(nodes, depth))
        return [self.trees[name] for name in names]


@pytest.mark.parametrize("program", [NO_TORCH, PREPARED], ids=["no torch", "nothing is compiled behind prepare"])
def test_a_program_of_its_own(program):
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    """A store with a table of what a model says after the tokens of such texts."""
    rng = np.random.default_rng(0)
    said = rng.integers(0, 8, (2, 5, 400, 2)) + 100 * np.arange(5)[:, None, None]
    folder = distilled_store(tmp_path_factory.mktemp("store"), list(said[0, ..., 0]), said[1].reshape(-1, 2))
    return open_datastore(folder)


@settings(max_examples=16)
@given(st.integers(0, 10**6), st.integers(1, 5), st.booleans(), st.booleans(), st.booleans())
def test_drafts_are_those_of_a_mixture_drafter_for_each_row(distilled, seed, rows, predicted, remembers, distils):
    rng = np.random.default_rng(seed)
    written = texts(seed, rows)
    stores = [distilled] if distils else []
    serving = ServingDrafter(CONFIG.with_options(session=remembers, session_tokens=500), datastores=stores)
    twins = Twins(SessionMemory(500) if remembers else None, stores)
    names = [f"r{i}" for i in range(rows)]
    for _ in range(2):  # a second request of each goes on with what the first ones learned
        at = {name: int(rng.integers(1, 30)) for name in names}
        for name, text in zip(names, written, strict=True):
            prediction = text[40:90] if predicted else None
            serving.start(name, text[: at[name]], prediction_ids=prediction)
            twins.start(name, text[: at[name]], prediction)
        while max(at.values()) < 100:
            trees = serving.draft(names, 24, max_depth=12, shape="tree")
            assert all(map(same, trees, twins.draft(names, 24, 12)))
            for name, text, tree in zip(names, written, trees, strict=True):
                tree.validate()
                assert distils or remembers or predicted or set(tree.token_ids.tolist()) <= set(text.tolist())
                accepted = len(tree.path_along(text[at[name] :]))
                emitted = text[at[name] : at[name] + accepted + 1]
                assert serving.feed(name, emitted) == accepted
                twins.feed(name, emitted)
                at[name] += len(emitted)
        for name in names:
            serving.finish(name)
            twins.drafters.pop(name).finish()


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(0, 20))
def test_a_chain_is_the_first_branch_of_a_whole_tree(seed, depth):
    [text] = texts(seed, 1)
    rng = np.random.default_rng(seed)
    chains, trees = ServingDrafter(CONFIG), ServingDrafter(CONFIG)
    at = int(rng.integers(1, 40))
    for drafter in (chains, trees):
        drafter.start("a", text[:at])
    while at < len(text):
        [chain] = chains.draft(["a"], 20, max_depth=depth)
        [tree] = trees.draft(["a"], 256, max_depth=depth, shape="tree")
        assert len(tree) < 256 and chain.is_chain
        assert same(chain, tree.first_branch())
        emitted = text[at : at + int(rng.integers(1, 5))]
        for drafter in (chains, trees):
            drafter.feed("a", emitted, verified=0)
        at += len(emitted)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("session", [True, False])
def test_only_a_session_is_given_what_ended_requests_generated(session, keep):
    drafter = ServingDrafter(SpeculationConfig(session=session))
    drafter.start("a", [1])
    drafter.feed("a", list(range(20, 60)))
    drafter.start("b", [20, 21, 22])
    assert 23 not in drafter.draft(["b"], 16)[0].token_ids, "what is under way is nobody else's"
    drafter.finish("a", keep=keep)
    drafter.start("c", [20, 21, 22])
    assert (23 in drafter.draft(["c"], 16)[0].token_ids) == (session and keep)
    assert list(drafter) == ["b", "c"] and "a" not in drafter


def test_what_was_learned_is_kept_between_runs(tmp_path, monkeypatch):
    def new():
        return ServingDrafter(SpeculationConfig(session=True), state=tmp_path / "state")

    first, said = new(), texts(5, 2)
    for i, text in enumerate(said):
        first.start(f"r{i}", text[:30], sampled=i == 1)
        for at in range(30, 120, 3):
            first.draft([f"r{i}"], 8)
            first.feed(f"r{i}", text[at : at + 3])
        first.finish(f"r{i}")
        assert len(new().session.texts) == 1, "written when the first one ends, then now and then"
    monkeypatch.setattr(serving, "_SAVE_EVERY", 0.0)
    first.start("r2", said[0][:30])
    first.finish("r2")
    for kind in ("greedy", "sampled"):
        assert np.load(tmp_path / "state" / f"{kind}.npy").any(), "learned apart"
    second = new()
    assert [t.tolist() for t in second.session.texts] == [t.tolist() for t in first.session.texts]
    for drafter in (first, second):
        drafter.start("again", said[0][30:40])
    wanted = first.draft(["again"], 16)[0].token_ids.tolist()
    assert len(wanted) > 4 and second.draft(["again"], 16)[0].token_ids.tolist() == wanted


def test_damaged_state_starts_anew(tmp_path, caplog):
    for name in ("greedy.npy", "sampled.npy", "session.bin"):
        (tmp_path / name).write_bytes(b"\x93NUMPY nothing of the kind")
    drafter = ServingDrafter(SpeculationConfig(session=True), state=tmp_path)
    assert len(caplog.records) == 3
    drafter.start("a", [1, 2, 1, 2, 1])
    assert drafter.draft(["a"], 1)[0].token_ids.tolist() == [2]
    drafter.feed("a", [2, 3])
    drafter.finish("a")
    assert len(ServingDrafter(SpeculationConfig(session=True), state=tmp_path).session.texts) == 1, "kept again"
    with pytest.raises(ConfigError, match="folder to keep state in"):
        ServingDrafter(state=tmp_path / "greedy.npy" / "below")


def test_tokens_that_the_model_does_not_have_are_not_drafted():
    text, lengths = np.array([[1, 2, 3, 9, 1, 2, 3, 9, 1]], np.int32), np.array([9], np.int32)
    drafter = ServingDrafter(vocabulary=6)
    drafter.start("a", text[0])
    assert drafter.draft(["a"], 8)[0].token_ids.tolist() == [2, 3]
    [tree] = drafter.draft(["a"], 64, shape="tree")
    tree.validate()
    assert len(tree) and tree.token_ids.max() < 6
    assert drafter.step(["a"], text, lengths, [0], [90], 8) == [[2, 3]]


def test_mistakes_are_named():
    drafter = ServingDrafter()
    drafter.start("a", [1, 2])
    with pytest.raises(RequestError, match="not under way, got 'a'"):
        drafter.start("a", [1])
    for call in (drafter.finish, drafter.length, lambda name: drafter.feed(name, [1]), lambda n: drafter.draft([n], 2)):
        with pytest.raises(RequestError, match="under way, got 'b'"):
            call("b")
    with pytest.raises(RequestError, match="each request once"):
        drafter.draft(["a", "a"], 2)
    for prompt in ([], [[1]], [-1, 2], [2**40], [0.5], "text"):
        with pytest.raises(PromptError):
            drafter.start("c", prompt)
    assert "c" not in drafter and drafter.length("a") == 2


def test_threads_may_call_at_once():
    drafter = ServingDrafter(SpeculationConfig(session=True))

    def client(number):
        rng = np.random.default_rng(number)
        for turn in range(8):
            name = f"{number}-{turn}"
            text = rng.integers(0, 4, 60).astype(np.int32) + 10 * number
            drafter.start(name, text[:5], sampled=turn % 2 == 1)
            for at in range(5, 60, 3):
                [tree] = drafter.draft([name], 8, shape=("chain", "tree")[turn % 2])
                tree.validate()
                drafter.feed(name, text[at : at + 3])
                drafter.measured(1.0)
            drafter.finish(name)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(client, range(4)))
    counts = drafter.statistics()
    assert (counts["requests"], counts["emitted"], counts["under_way"]) == (32, 32 * 55, 0)
