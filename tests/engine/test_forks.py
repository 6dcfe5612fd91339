"""A process that has sorted, searched or decoded forks: the child does the same to its end, and so does the parent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import running

pytestmark = pytest.mark.threads

MODEL = """
def small_model():
    import torch
    import retrieve_spec
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    sizes = dict(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, eos_token_id=None, pad_token_id=0)
    return retrieve_spec.accelerate(LlamaForCausalLM(config).eval())
"""
PARENT = (
    MODEL
    + """
import multiprocessing, os, sys
import numpy as np

def sort():
    from retrieve_spec.datastore.segment import suffix_array
    return suffix_array(np.random.default_rng(0).integers(1, 200, 3000).astype(np.uint16))

def index():
    from retrieve_spec.datastore.dense import build_index, nearest
    keys = np.random.default_rng(0).standard_normal((2000, 8), np.float32)
    return nearest(build_index(keys / np.linalg.norm(keys, axis=1, keepdims=True)), keys[:300], 5)[1]

def build():
    import tempfile
    import retrieve_spec
    from byte_tokenizers import byte_tokenizer
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/text", "w") as file:
            file.write("".join(f"{i} squared is {i * i}\\n" for i in range(500)))
        store = f"{folder}/store"
        retrieve_spec.build_datastore(store, f"{folder}/text", byte_tokenizer(), workers=2)
        return retrieve_spec.open_datastore(store).segments[0].suffix_array.copy()

def generate(made={}):
    import torch
    if not made:
        made["model"] = small_model()
    with torch.no_grad():
        (torch.ones(1000, 1000) @ torch.ones(1000, 1000)).exp()  # as anything of the user's own
    return made["model"].generate(torch.arange(60)[None], max_new_tokens=9).numpy()

def same(action, expected):
    sys.exit(not np.array_equal(action(), expected))

action = globals()[sys.argv[1]]
expected = action()
for repeat in range(2):
    if sys.argv[2] == "multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=same, args=(action, expected))
        child.start()
        child.join()
        assert child.exitcode == 0, child.exitcode
    else:
        pid = os.fork()
        if pid == 0:
            os._exit(not np.array_equal(action(), expected))
        assert os.waitpid(pid, 0) == (pid, 0)
    assert np.array_equal(action(), expected)
"""
)


@pytest.mark.parametrize(
    ("action", "fork"),
    [
        ("sort", "os"),
        ("sort", "multiprocessing"),
        ("index", "os"),
        ("build", "os"),
        pytest.param("generate", "os", marks=pytest.mark.slow),
    ],
)
def test_a_forked_child_goes_on(action: str, fork: str) -> None:
    stores = str(Path(__file__).parents[1] / "datastore")
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join([stores, *sys.path])}
    command = [sys.executable, "-W", "ignore", "-c", PARENT, action, fork]
    with running(command, env=environment, stderr=subprocess.PIPE, text=True) as parent:
        _, said = parent.communicate()
    assert parent.returncode == 0, said


IN_A_STEP = (
    MODEL
    + """
import os, threading, torch
model = small_model()
prompt = torch.arange(60)[None]
expected = model.generate(prompt, max_new_tokens=9)
inside, forked = threading.Event(), threading.Event()

def pause(input_ids, scores):
    inside.set()
    forked.wait()
    return torch.zeros(len(input_ids), dtype=torch.bool)

said = []
other = threading.Thread(
    target=lambda: said.append(model.generate(prompt, max_new_tokens=9, stopping_criteria=[pause]))
)
other.start()
inside.wait()
pid = os.fork()
if pid == 0:
    os._exit(not torch.equal(model.generate(prompt, max_new_tokens=9), expected))
status = os.waitpid(pid, 0)[1]
forked.set()
other.join()
assert status == 0, status
assert torch.equal(said[0], expected)
"""
)


def test_a_child_does_not_wait_for_a_step_of_its_parent() -> None:
    with running([sys.executable, "-W", "ignore", "-c", IN_A_STEP], stderr=subprocess.PIPE, text=True) as parent:
        _, said = parent.communicate()
    assert parent.returncode == 0, said
