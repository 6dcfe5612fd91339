import numpy as np
import pytest
from checked_drafts import check_draft
from number_tokens import number_tokenizer

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

    def __init__(self, drafter, budget=None, top=None, hidden=None):
        self.drafter = drafter
        self.budget = budget or (lambda left: Budget(32, left))
        self.top, self.hidden = top, hidden
        self.trees = []
        self.accepted = []

    def generate(self, output):
        output = np.asarray(output, np.int32)
        at = 0
        while at < len(output):
            budget = self.budget(len(output) - at)
            tree = self.drafter.propose(budget)
            check_draft(tree, budget)
            path = tree.path_along(output[at:])
            emitted = output[at : at + len(path) + 1]
            top = self.top(tree, output[: at + 1]) if self.top else (None, None)
            hidden = np.tile(self.hidden(output[: at + len(path)]), (len(tree) + 1, 1)) if self.hidden else None
            self.drafter.observe(VerifiedPass(tree, path, emitted, *top, hidden=hidden))
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
