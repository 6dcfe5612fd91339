"""The training script makes, from a tiny corpus and in one step, a model that loads and completes."""

import json
import sys

import pytest
import torch
import train_reference_model as script

from retrieve_spec.reference_model import load_model


@pytest.fixture
def site(tmp_path):
    """A site-packages with one package of each licence that matters."""

    def package(name, licence, text):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text(text)
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\nLicense: {licence}\n")
        (info / "RECORD").write_text(f"{name}/__init__.py,,\n")

    code = "".join(f"def function_{i}(value):\n    return value + {i}\n\n\n" for i in range(30))
    package("friendly", "MIT", code)
    package("copy", "MIT", code.replace("\n\n\n", "\n\n"))
    package("viral", "GPLv3", code + "# viral\n")
    package("networkx", "BSD", code + "# held out\n")
    return tmp_path


def test_corpus_takes_permissive_unique_files_and_leaves_the_holdout_out(site):
    documents, used = script.collect([str(site)], per_package_mb=0.01)
    ours = [d for d in documents if d.package != "python-stdlib"]
    (path,) = (document.path for document in ours)  # the other one differs in blank lines only
    assert path in ("friendly/__init__.py", "copy/__init__.py")
    assert used["python-stdlib"]["chars"] > 0 and not {"viral", "networkx"} & set(used)


def test_one_step_on_a_tiny_corpus_gives_a_model_that_completes(site, tmp_path, monkeypatch):
    out = tmp_path / "out"
    options = {
        "vocab": 400,
        "seq": 64,
        "long-seq": 64,
        "micro-tokens": 64,
        "tokens-per-step": 128,
        "threads": torch.get_num_threads(),
    }
    sizes = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words = ["--out", str(out), "--roots", str(site), "--per-package-mb", "0.01", "--shape", "tiny", "--no-compile"]
    monkeypatch.setattr(sys, "argv", ["train", *words, "--max-steps", "1", *sizes])
    script.main()
    assert json.loads((out / "training.json").read_text()).items() >= {"steps": 1, "tokens": 128}.items()
    model, tokenizer = load_model(str(out), device="cpu")
    output = model.generate(**tokenizer("def f", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert output.shape[1] > 3
