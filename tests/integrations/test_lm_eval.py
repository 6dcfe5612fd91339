"""lm-eval's scores and generations are the same with drafting on and off (`make test-lm-eval` installs it)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import retrieve_spec as rs
from retrieve_spec.reference_model import load_model

lm_eval = pytest.importorskip("lm_eval")

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: {kind}
test_split: test
doc_to_text: "{{{{code}}}}"
doc_to_target: "{{{{answer}}}}"
"""
GENERATED = (
    TASK
    + """\
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 24
  do_sample: false
metric_list:
  - metric: exact_match
"""
)
CHOSEN = (
    TASK
    + """\
doc_to_choice: ["b", "a"]
metric_list:
  - metric: acc
"""
)
CODE = (
    "def add(a, b):\n    return a +",
    "def swap(a, b):\n    return b,",
    "def first(a, b):\n    return",
    "def twice(f):\n    def twice(f):\n        return f\n    def",
)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with a task that generates and one that compares log-likelihoods."""
    data = tmp_path / "code.jsonl"
    data.write_text("".join(json.dumps({"code": code, "answer": i % 2}) + "\n" for i, code in enumerate(CODE)))
    (tmp_path / "generated.yaml").write_text(GENERATED.format(name="generated", data=data, kind="generate_until"))
    (tmp_path / "chosen.yaml").write_text(CHOSEN.format(name="chosen", data=data, kind="multiple_choice"))
    return tmp_path


def evaluated(model: Any, tokenizer: Any, tasks: Path, batch: int) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Scores by task, and what the model said to every document."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch),
        tasks=["generated", "chosen"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        verbosity="ERROR",
    )
    return found["results"], {name: [s["resps"] for s in samples] for name, samples in found["samples"].items()}


@pytest.mark.parametrize("batch", [1, 3])
def test_scores_are_identical_on_and_off(tasks: Path, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tasks / "cache"))
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "TRUE")  # lm-eval's imports set it, and do not take it back
    model, tokenizer = load_model("reference", dtype="float32", device="cpu")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with torch.no_grad():
        off = evaluated(model, tokenizer, tasks, batch)
        rs.accelerate(model, tokenizer)
        passes = []
        generate = model.generate

        def noted(*given: Any, **options: Any) -> Any:
            said = generate(*given, **options)
            passes.append(model.speculation.last)
            return said

        model.generate = noted
        on = evaluated(model, tokenizer, tasks, batch)
    assert on == off
    if batch == 1:
        assert all(report.mode == "tree" for report in passes)
        assert sum(report.nodes for report in passes) > 0, "nothing was drafted"
    else:  # lm-eval's stop criterion tells rows apart: batches are left to the original `generate`, a last row is not
        assert {report.mode for report in passes} == {"delegated", "tree"}
    assert len({json.dumps(said) for said in on[1]["generated"]}) > 1, "all documents were answered alike"
