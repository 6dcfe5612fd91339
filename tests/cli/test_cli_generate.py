"""`retrieve-spec generate` with the bundled model: text, figures, identity, and every wrong input."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import running

from retrieve_spec import cli
from retrieve_spec.errors import ConfigError, ModelNotFoundError
from retrieve_spec.reference_model import load_model, reference_path

pytestmark = pytest.mark.usefixtures("loaded_once")
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"
FIELDS = {
    *("text", "token_ids", "new_tokens", "passes", "tokens_per_pass", "seconds", "tokens_per_second", "mode"),
    "accepted_by_source",
}


@pytest.fixture(scope="module")
def plain_ids():
    model, tokenizer = load_model(device="cpu")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist(), tokenizer


def run_json(capsys, *words):
    assert cli.run(["generate", "--json", "--device", "cpu", "--max-new-tokens", "24", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return json.loads(lines[-1]), lines


def test_json_is_one_object_with_the_plain_text(capsys, plain_ids):
    result, lines = run_json(capsys, "--prompt", PROMPT, "--compare")
    ids, tokenizer = plain_ids
    assert len(lines) == 1 and set(result) >= FIELDS and result["identical"] is True
    assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["plain_tokens_per_second"])
    assert (result["token_ids"], result["text"]) == (ids, tokenizer.decode(ids, skip_special_tokens=True))
    assert result["new_tokens"] == len(ids)
    assert result["tokens_per_pass"] == pytest.approx(len(ids) / result["passes"])
    assert sum(result["accepted_by_source"].values()) <= len(ids)


def test_text_streams_to_stdout_and_figures_to_stderr(capsys, plain_ids):
    assert cli.run(["generate", "--device", "cpu", "--max-new-tokens", "24", "--prompt", PROMPT]) == 0
    ids, tokenizer = plain_ids
    streams = capsys.readouterr()
    assert streams.out == tokenizer.decode(ids, skip_special_tokens=True) + "\n"
    assert f"{len(ids)} tokens in" in streams.err
    assert "tokens per pass" in streams.err


def test_sampled_text_is_identical_with_and_without_drafts_and_follows_the_seed(capsys):
    words = ["--prompt", PROMPT, "--temperature", "1.3", "--top-p", "0.98", "--top-k", "400"]
    first, _ = run_json(capsys, *words, "--seed", "3", "--compare")
    assert first["identical"] is True
    off, _ = run_json(capsys, *words, "--seed", "3", "--nodes", "0")
    assert sum(off["accepted_by_source"].values()) == 0
    other, _ = run_json(capsys, *words, "--seed", "4")
    assert off["token_ids"] == first["token_ids"]
    assert other["token_ids"] != first["token_ids"]


def test_a_model_folder_a_prompt_file_standard_input_and_a_dtype(capsys, tmp_path, monkeypatch):
    model, tokenizer = load_model(device="cpu")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "prompt.py").write_text(PROMPT)
    words = ["--model", str(tmp_path / "model"), "--prompt-file", str(tmp_path / "prompt.py")]
    own, _ = run_json(capsys, *words)
    bundled, _ = run_json(capsys, "--prompt", PROMPT)
    assert own["token_ids"] == bundled["token_ids"]
    halved, _ = run_json(capsys, *words, "--dtype", "bfloat16")
    assert halved["new_tokens"] == 24
    with open(tmp_path / "prompt.py") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        piped, _ = run_json(capsys)
    assert piped["token_ids"] == own["token_ids"]


def test_a_folder_that_holds_no_causal_model(capsys, tmp_path):
    from transformers import T5Config

    _, tokenizer = load_model(device="cpu")
    T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, vocab_size=10).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    assert cli.run(["generate", "--prompt", "x", "--model", str(tmp_path / "t5")]) == 1
    assert "as a causal language model" in capsys.readouterr().err


@pytest.mark.parametrize("name", [3, None, Path("/nowhere"), "nowhere.json"])
def test_what_names_no_model_is_refused_without_asking_the_hub(name):
    with pytest.raises((ConfigError, ModelNotFoundError), match=r"got (3|None|nothing there)"):
        load_model(name)


SILENT_HUB = """
from retrieve_spec.datastore.fingerprint import load_tokenizer
from retrieve_spec.errors import ModelNotFoundError
from retrieve_spec.reference_model import load_model
model, tokenizer = load_model("me/kept")
assert load_tokenizer("me/kept").get_vocab_size() == len(tokenizer)
for load in (load_model, load_tokenizer):
    try:
        load("me/mistyped")
    except ModelNotFoundError as error:
        print(error)
"""


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path):
    """What is in the cache is loaded; what is not is one message, without rounds of retries."""
    kept = tmp_path / "models--me--kept"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("c" * 40)
    shutil.copytree(reference_path(), kept / "snapshots" / ("c" * 40))
    with socket.socket() as closed:  # bound, but nobody listens
        closed.bind(("127.0.0.1", 0))
        place = f"http://127.0.0.1:{closed.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": place, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        done = subprocess.run([sys.executable, "-c", SILENT_HUB], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(
        f"could not load 'me/mistyped' from the model hub: {place} does not answer" in line for line in lines
    )
    assert "Retrying" not in done.stderr + done.stdout


def test_ctrl_c_while_streaming_ends_with_130_and_no_traceback():
    command = [sys.executable, "-m", "retrieve_spec.cli", "generate", "--device", "cpu", "--max-new-tokens", "1900"]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with running([*command, "--draft", "off", "--prompt", PROMPT], **piped) as process:
        assert process.stdout.read(20)  # it streams
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert b"Interrupted." in err and b"Traceback" not in err
