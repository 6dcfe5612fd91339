import numpy as np
import pytest
from number_tokens import number_tokenizer

from retrieve_spec.bench.replay import walk
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.drafting.drafter import Budget, VerifiedPass


@pytest.fixture
def numbers():
    return number_tokenizer()


@pytest.fixture(scope="session")
def make_store(tmp_path_factory):
    """Builds and opens a store of documents given as lists of numbers."""

    def make(documents, config=None, add=()):
        from retrieve_spec.datastore.build import add_documents

        folder = tmp_path_factory.mktemp("store")
        for name, part in (("texts", documents), ("more", add)):
            (folder / name).mkdir()
            for i, document in enumerate(part):
                (folder / name / f"{i:03}.txt").write_text(" ".join(map(str, document)))
        build_datastore(folder / "store", str(folder / "texts"), number_tokenizer(), config=config)
        if add:
            add_documents(folder / "store", str(folder / "more"), config=config)
        return open_datastore(folder / "store")

    return make


class Run:
    """Greedy verification of one drafter against a fixed text, as the decoding loop does it."""

    def __init__(self, drafter, budget=None, top=None):
        self.drafter = drafter
        self.budget = budget or (lambda left: Budget(32, left))
        self.top = top
        self.trees = []
        self.accepted = []

    def generate(self, output):
        output = np.asarray(output, np.int32)
        at = 0
        while at < len(output):
            tree = self.drafter.propose(self.budget(len(output) - at))
            tree.validate()
            path = walk(tree, output[at:])
            emitted = output[at : at + len(path) + 1]
            top = self.top(tree, output[: at + 1]) if self.top else (None, None)
            self.drafter.observe(VerifiedPass(tree, path, emitted, *top))
            self.trees.append(tree)
            self.accepted.append(len(path))
            at += len(emitted)
        return self

    def request(self, prompt, output, prediction=None):
        self.drafter.start(np.asarray(prompt, np.int32), prediction)
        self.generate(output)
        self.drafter.finish()
        return self


@pytest.fixture
def run():
    return Run


def markov(seed, length, alphabet=40, order=2, peaked=0.75):
    """A text in which the last `order` tokens mostly, but not always, decide the next one."""
    rng = np.random.default_rng(seed)
    choices = {}
    text = list(rng.integers(0, alphabet, order))
    while len(text) < length:
        key = tuple(text[-order:])
        if key not in choices:
            choices[key] = rng.integers(0, alphabet, 3)
        pick = choices[key][rng.choice(3, p=[peaked, 0.9 * (1 - peaked), 0.1 * (1 - peaked)])]
        text.append(int(pick if rng.random() < 0.97 else rng.integers(0, alphabet)))
    return np.array(text, np.int32)


@pytest.fixture
def markov_text():
    return markov
