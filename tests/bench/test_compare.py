"""The comparison tool: adapters draft what the peers' rules say, and a missing peer is named with its reason."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from retrieve_spec.bench.replay import Replay, TraceRow
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.tree import DraftTree

TOOLS = Path(__file__).parents[2] / "tools" / "compare"


@pytest.fixture(scope="module")
def tools():
    sys.path.insert(0, str(TOOLS))
    try:
        import compare
        import peers
        import sources

        yield compare, peers, sources
    finally:
        sys.path.remove(str(TOOLS))


def ids(*tokens):
    return np.array(tokens, np.int32)


def test_transformers_lookup_takes_the_first_match_of_two_tokens(tools):
    _, peers, _ = tools
    peer = peers.TransformersLookup()
    peer.start(ids(1, 2, 3, 4, 9, 1, 2, 7, 1))
    peer.observe(VerifiedPass(DraftTree(), ids(), ids(2)))
    assert peer.propose(Budget(60, 60)).token_ids.tolist()[:4] == [3, 4, 9, 1]
    assert len(peer.propose(Budget(2, 60))) == 2
    peer.feed(ids(77))
    assert len(peer.propose(Budget(60, 60))) == 0


def test_a_replay_of_a_peer_counts_passes(tools):
    _, peers, _ = tools
    row = TraceRow("", ids(1, 2, 3, 4, 5, 6), [(ids(1, 2, 3, 4, 5, 6, 1, 2), True)])
    result = Replay(peers.TransformersLookup(), 60).run([row])
    # "1" is emitted without a draft, then 2 … 6 and 1 follow the prompt's, the last token ends the row
    assert result["tokens"] == 8
    assert result["passes"] <= 3


def test_trees_of_peers_are_valid(tools):
    _, peers, _ = tools
    tree = peers.as_tree(ids(5, 6, 7, 8), ids(-1, 0, -1, 1), [0.9, 0.5, 0.1, 0.4])
    tree.validate()
    assert tree.depth.tolist() == [1, 2, 1, 3]
    assert tree.expected_accepted == pytest.approx(1.9, rel=1e-5)


def test_a_missing_peer_is_skipped_with_its_reason(tools, monkeypatch):
    compare, peers, sources = tools

    def missing():
        raise sources.Skipped("it is not there")

    row = TraceRow("", ids(1, 2), [(ids(1, 2), True)])
    skipped = compare.measure(missing, [row], 8)
    assert skipped == {"skipped": "it is not there"}
    there = compare.measure(peers.TransformersLookup, [row], 8)
    text = compare.table({"file": {"here": there, "gone": skipped}}, "a machine", "a command")
    assert "skipped: it is not there" in text
    assert "a machine" in text


def test_ours_can_be_replayed_like_a_peer(tools):
    compare, _, _ = tools
    factories = compare.drafters(["ours: auto"])
    row = TraceRow("", ids(*range(40)), [(ids(*range(40)), True)])
    for name, make in factories.items():
        assert compare.measure(make, [row], 16)["tokens_per_pass"] > 3, name


def test_the_command_that_is_published_names_files_only(tools, tmp_path):
    compare, _, _ = tools
    file = tmp_path / "trace.jsonl"
    file.write_text("")
    command = compare.shown_command([str(file), "--tokenizer", str(file), "--native", f"a*={file}", "--limit", "3"])
    assert str(tmp_path) not in command
    assert command.endswith("trace.jsonl --tokenizer trace.jsonl --native 'a*=trace.jsonl' --limit 3")


@pytest.mark.parametrize("tool", ["pip", "cmake"])
def test_a_tool_that_fails_is_a_reason_and_no_crash(tools, monkeypatch, tmp_path, tool):
    _, _, sources = tools
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path))
    if tool == "cmake":
        monkeypatch.setattr(sources.shutil, "which", lambda name: None)
        with pytest.raises(sources.Skipped, match="cmake is not installed"):
            sources.arctic_folder()
    else:
        with pytest.raises(sources.Skipped, match="pip failed: ERROR: no such package"):
            sources._run([sys.executable, "-c", "import sys; sys.exit('ERROR: no such package')"], "pip")
