"""The demo: what it answers with the bundled model and with a chat model, what it says of both, and its store."""

from typing import Any

import pytest
from click.testing import CliRunner

from retrieve_spec import demo
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore

pytestmark = pytest.mark.threads


@pytest.mark.slow
def test_without_the_real_model_the_bundled_one_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "a.py").write_text("def function(argument):\n    return argument\n" * 20)
    build_datastore(tmp_path / "s", str(tmp_path / "a.py"), "reference")
    monkeypatch.setattr(demo, "stdlib_store", lambda tokenizer, console: open_datastore(tmp_path / "s"))
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("retrieve_spec.model_files.find_spec", lambda name: None)
    result = CliRunner().invoke(demo.main, ["--max-new-tokens", "8"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for words in ("retrieve-spec models install smollm2", "with a store", "Median over 5 kinds", "Identical: 6 of 6"):
        assert words in result.output


@pytest.mark.slow
def test_a_chat_model_answers_each_kind_and_a_second_turn(smollm2: str) -> None:
    result = CliRunner().invoke(demo.main, ["--max-new-tokens", "8", "--no-store"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for words in ("summarise", "correct", "type hints, second turn", "JSON", "question", "Identical: 7 of 7"):
        assert words in result.output
