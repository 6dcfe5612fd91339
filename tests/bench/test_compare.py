"""The comparison tool: adapters draft what the peers' rules say, and a missing peer is named with its reason."""

from __future__ import annotations

import json

import compare
import numpy as np
import peers
import sources
from tokenizers import Tokenizer

from retrieve_spec.bench.replay import TraceRow
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.reference_model import reference_path


def ids(*tokens):
    return np.array(tokens, np.int32)


def test_transformers_lookup_takes_the_first_match_of_two_tokens():
    peer = peers.TransformersLookup()
    peer.start(ids(1, 2, 3, 4, 9, 1, 2, 7, 1))
    peer.observe(VerifiedPass(DraftTree(), ids(), ids(2)))
    assert peer.propose(Budget(60, 60)).token_ids.tolist()[:4] == [3, 4, 9, 1]
    assert len(peer.propose(Budget(2, 60))) == 2
    peer.feed(ids(77))
    assert len(peer.propose(Budget(60, 60))) == 0


def test_a_missing_peer_is_skipped_with_its_reason():

    def missing():
        raise sources.Skipped("it is not there")

    row = TraceRow("", ids(1, 2), [(ids(1, 2), True)])
    assert compare.measure_drafter(missing, [row], 8) == {"skipped": "it is not there"}
    assert compare.measure_drafter(peers.TransformersLookup, [row], 8)["tokens"] == 2


def test_half_of_the_groups_is_replayed_and_the_rest_may_be_known(tmp_path):
    rows = [
        {"prompt": "a = 1\n", "output": f"value_{i // 2} = {i // 2}\n", "group": f"g{i // 2}", "meta": {"loop": i == 3}}
        for i in range(40)
    ]  # fmt: skip
    tokenizer = Tokenizer.from_file(str(reference_path() / "tokenizer.json"))
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = compare.read_workload(path, tokenizer, 100, 10**6)
    replayed = {tokenizer.decode(row.segments[0][0].tolist()) for row in found.rows}
    assert len(replayed) == 10
    assert not replayed & {tokenizer.decode(answer.tolist()) for answer in found.answers}
    assert {len(found.rows), len(found.answers)} == {19, 20}
    assert len(compare.read_workload(path, tokenizer, 5, 10**6).rows) == 5
    assert len(compare.read_workload(path, tokenizer, 100, 3).rows) == 1
    assert compare.build_store(found, tokenizer, tmp_path).manifest.tokens > 0


def test_ours_can_be_replayed_and_sizes_its_trees_by_what_a_node_costs():
    factories = compare.drafters(["ours: auto"], None, None)
    row = TraceRow("", ids(*range(40)), [(ids(*range(20), *range(100, 140), *range(20)), True)])
    found = {name: compare.measure_drafter(make, [row], 16, 0.01) for name, make in factories.items()}
    assert all(figures["tokens_per_pass"] > 1.2 for figures in found.values())
    dear = compare.measure_drafter(factories["ours: auto"], [row], 16, 0.5)
    assert dear["nodes_per_pass"] < found["ours: auto"]["nodes_per_pass"]
