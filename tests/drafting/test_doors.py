"""The public door of drafting: other engines stand behind it, so it needs neither torch nor transformers."""

import subprocess
import sys

ENGINE = '''
import sys


class Blocked:
    """Finds no model library."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "accelerate", "faiss"):
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Blocked())

import numpy as np

from retrieve_spec.drafting import Budget, Drafter, DraftTree, MixtureDrafter, VerifiedPass


def says(text):
    """The target: it goes round in a circle of seven tokens."""
    return text[-1] % 7 + 1


drafter = MixtureDrafter()
assert isinstance(drafter, Drafter)
text = [1, 2, 3, 4, 5, 6, 7, 1]
drafter.start(np.array(text, np.int32))
passes = 0
while len(text) < 60:
    tree = drafter.propose(Budget(max_nodes=16, max_depth=8))
    tree.validate()
    path, emitted, node = [], [], -1
    contexts = [[text[-1]]] + [[t] for t in tree.token_ids.tolist()]
    while True:
        emitted.append(says(text + emitted))
        children = np.flatnonzero((tree.parent == node) & (tree.token_ids == emitted[-1]))
        if not len(children):
            break
        child = int(children[0])
        assert tree.ancestors[child, node // 32] >> node % 32 & 1 if node >= 0 else tree.depth[child] == 1
        path.append(child)
        node = child
    top = np.array([[says(context), 9] for context in contexts], np.int32)
    logits = np.tile(np.array([5, 0], np.float32), (len(top), 1))
    emitted = np.array(emitted, np.int32)
    drafter.observe(VerifiedPass(tree, np.array(path, np.int32), emitted, top, logits))
    text += emitted.tolist()
    passes += 1
drafter.finish()
assert text == [i % 7 + 1 for i in range(len(text))]
assert passes < 20, passes
assert not {"torch", "transformers"} & set(sys.modules)
'''


def test_an_engine_without_torch_drafts():
    subprocess.run([sys.executable, "-W", "ignore", "-c", ENGINE], check=True)
