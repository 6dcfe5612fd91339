"""The plug-in against the classes of SGLang's released wheel; `make test-sglang` runs these where the wheel is.

No server runs here: it needs a GPU. What can be imported of the wheel is imported; of modules that load GPU packages,
the definitions are run without their imports.
"""

import ast
import importlib
import importlib.util
import inspect
import json
import logging
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Optional

import numpy as np
import pytest
import sglang_engine as engine
import torch
from made_up_model import asked, plain

from retrieve_spec.integrations import hosted, sglang

for needed in ("sglang", "msgspec", "orjson", "zmq"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip("SGLang has an environment of its own: make test-sglang", allow_module_level=True)
ROOT = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def wheel():
    """SGLang without what its first module loads; taken away again behind these tests."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "sglang"}
    bare = ModuleType("sglang")
    bare.__path__ = [str(ROOT)]
    sys.modules["sglang"] = bare
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def registered(wheel):
    registry = importlib.import_module("sglang.srt.speculative.spec_registry")._REGISTRY
    sglang.register()
    yield importlib.import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm
    registry.clear()


def tree_of(path):
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def definition(path, name):
    return next(node for node in ast.walk(tree_of(path)) if getattr(node, "name", None) == name)


def run_definitions(path, **names):
    """What a module of the wheel defines, its own imports left out: `names` stand for what they bring."""
    tree = tree_of(path)
    tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in ast.walk(tree):  # annotations name what was not imported
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
            for argument in (*node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg):
                if argument is not None:
                    argument.annotation = None
    found = {"torch": torch, "np": np, "logging": logging, "Optional": Optional, "List": list, **names}
    found["__name__"] = path
    exec(compile(tree, str(ROOT / path), "exec"), found)
    return found


def test_the_plugin_is_found_and_run(wheel, monkeypatch):
    plugins = importlib.import_module("sglang.srt.plugins")
    group = plugins.GENERAL_PLUGINS_GROUP
    written = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["entry-points"][group]
    entries = [EntryPoint(name, value, group) for name, value in written.items()]
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries)
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    plugins.load_plugins()
    registry = importlib.import_module("sglang.srt.speculative.spec_registry")._REGISTRY
    assert list(registry) == [sglang.NAME]
    registry.clear()


def test_the_algorithm_answers_as_ngram_does(registered):
    ours, builtin = registered.from_string("retrieve_spec"), registered.NGRAM
    asked = [name for name, one in vars(registered).items() if inspect.isfunction(one) and name[0] != "_"]
    assert {"is_ngram", "create_future_map", "carries_draft_hidden_states", "has_draft_kv"} <= set(asked)
    for name in asked:
        assert callable(getattr(ours, name)), name
        if not inspect.signature(getattr(builtin, name)).parameters:
            assert getattr(ours, name)() == getattr(builtin, name)(), name
    assert ours.is_ngram() and ours.supports_overlap and ours.get_num_tokens_per_req_for_target_verify(12, False) == 12
    assert repr(ours) == "CustomSpecAlgo('RETRIEVE_SPEC')"


SETTINGS = (
    "disable_overlap_schedule",
    "enable_mixed_chunk",
    "max_running_requests",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
)


@pytest.mark.parametrize(
    "given",
    [{}, {"speculative_num_draft_tokens": 32}, {"device": "cpu"}, {"speculative_ngram_max_bfs_breadth": 1}],
    ids=repr,
)
def test_arguments_are_resolved_as_those_of_ngram(registered, monkeypatch, given):
    monkeypatch.setattr(hosted, "version", lambda name: "0.5.23")
    record = importlib.import_module("sglang.srt.server_args").ServerArgs
    resolve = importlib.import_module("sglang.srt.arg_groups.speculative_hook").handle_speculative_decoding
    view = importlib.import_module("sglang.srt.arg_groups.overrides").resolving_view
    found = []
    for name in ("NGRAM", "retrieve_spec"):
        arguments = record(
            model_path="none", **{"device": "cuda", "page_size": 1, "speculative_algorithm": name, **given}
        )
        resolve(arguments)
        found.append({setting: getattr(view(arguments), setting) for setting in SETTINGS})
    assert found[0] == found[1]
    assert view(arguments).speculative_ngram_capacity == sglang._SPARE


def ngram_module(**names):
    """The n-gram worker of the wheel itself, over stand-ins for kernels, pools and the target."""
    spec_info = importlib.import_module("sglang.srt.speculative.spec_info")
    info = run_definitions(
        "srt/speculative/ngram_info.py",
        **{name: getattr(spec_info, name) for name in ("SpecInput", "SpecInputType")},
        IdSpaceKind=SimpleNamespace(FULL=0),
    )

    def reconstruct(mask, lengths, positions, index, child, sibling, rows, width):
        below, beside = engine.links(mask.reshape(rows, width, width).numpy())
        child.copy_(torch.from_numpy(below))
        sibling.copy_(torch.from_numpy(beside))
        index.copy_(torch.arange(rows * width).reshape(rows, width))
        depth = mask.reshape(rows, width, width).sum(-1) - 1
        positions.copy_((depth + lengths[:, None]).flatten())

    nothing = lambda *args, **kwargs: None  # noqa: E731
    spec = SimpleNamespace(
        speculative_num_draft_tokens=engine.WIDTH,
        speculative_ngram_external_corpus_path=None,
        speculative_eagle_topk=10,
        **{f"speculative_ngram_{name}": 4 for name in ("max_trie_depth", "min_bfs_breadth", "max_bfs_breadth")},
        **{f"speculative_ngram_{name}": 4 for name in ("capacity", "match_type", "external_sam_budget")},
        speculative_ngram_external_corpus_max_tokens=4,
        speculative_num_steps=1,
    )
    base = type("BaseSpecWorker", (), {"target_worker": property(lambda self: self._target_worker)})
    return run_definitions(
        "srt/speculative/ngram_worker.py",
        **{
            "assign_extend_cache_locs_func": nothing,
            "reconstruct_indices_from_tree_mask_func": reconstruct,
            "BaseSpecWorker": base,
            "ForwardMode": engine.MODES,
            "GenerationBatchResult": SimpleNamespace,
            "NgramCorpus": lambda **given: SimpleNamespace(**given),
            "NgramVerifyInput": info["NgramVerifyInput"],
            "commit_mamba_states_after_verify": nothing,
            "eagle_sample": engine.eagle_sample,
            "get_device": lambda: SimpleNamespace(device="cpu"),
            "get_schedule": lambda: SimpleNamespace(
                page_size=1, disable_overlap_schedule=not names.get("overlap", True)
            ),
            "get_spec": lambda: spec,
            "is_cpu": lambda: False,
            "maybe_detect_inf": nothing,
            "maybe_detect_nan": nothing,
            "move_accept_tokens_to_target_kvcache": nothing,
            "prepare_mamba_track_for_verify": nothing,
            "record_stream_for_v2_verify": nothing,
            "set_time_batch": nothing,
        },
    )


@pytest.mark.parametrize("overlap", [True, False])
def test_texts_behind_the_released_worker(wheel, monkeypatch, overlap):
    module = ngram_module(overlap=overlap)
    importlib.import_module("sglang.srt.speculative.spec_info")
    engine.pretend_modules(monkeypatch)
    monkeypatch.setenv(sglang.PLACE, json.dumps({"session": True}))
    device = SimpleNamespace(current_stream=lambda: None)
    monkeypatch.setattr(torch, "get_device_module", lambda name: device)
    worker_class = type("RetrieveSpecWorker", (sglang.Drafting, module["NGRAMWorker"]), {})
    worker = worker_class(None, 0, 0, engine.Target())
    worker.alloc_memory_pool()
    scheduler = engine.Scheduler(worker, seed=3, retracts=0.05)
    wanted = asked(12, "max_new_tokens")
    for name, request in wanted.items():
        scheduler.add(name, **request)
    assert scheduler.serve() == {name: plain(*request.values()) for name, request in wanted.items()}
    assert scheduler.accepted > scheduler.steps / 2
    assert worker.ngram_corpus.statistics()["failures"] == 0
    worker.clear_cache_pool()
    assert not list(worker.ngram_corpus.drafter)


def test_what_is_overridden_is_what_the_worker_calls(wheel):
    module = ngram_module()
    builtin = module["NGRAMWorker"]
    for name in ("_prepare_draft_tokens", "_update_ngram_corpus"):
        ours, theirs = (inspect.signature(getattr(one, name)) for one in (sglang.Drafting, builtin))
        assert list(ours.parameters) == list(theirs.parameters)
    called = {
        node.attr
        for node in ast.walk(definition("srt/speculative/ngram_worker.py", "forward_batch_generation"))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.ngram_corpus"
    }
    assert called == {"erase_match_state"} and set(dir(sglang.Corpus)) > called
    assert list(inspect.signature(sglang.Corpus.erase_match_state).parameters) == ["self", "req_ids"]


def names_set_in(path, class_name):
    """Attributes that a class sets, and methods and properties that it has."""
    body = definition(path, class_name)
    stored = {
        node.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return stored | {node.name for node in body.body if isinstance(node, ast.FunctionDef)}


def test_what_is_looked_at_is_there(wheel):
    asked = vars(engine.Request("a", [1])).keys() - {"truth", "accepted", "finished_reason"}
    assert asked | {"finished"} <= names_set_in("srt/managers/schedule_batch.py", "Req")
    group = names_set_in("srt/distributed/parallel_state.py", "GroupCoordinator")
    assert {"rank_in_group", "world_size", "first_rank", "cpu_group"} <= group
    assert "tokenizer" in names_set_in("srt/managers/tp_worker.py", "TpModelWorker")
    overrides = importlib.import_module("sglang.srt.arg_groups.overrides")
    context = importlib.import_module("sglang.srt.runtime_context")
    assert callable(overrides.resolved_view) and callable(context.attn_dp_enabled_of) and callable(context.get_parallel)
    assert {"dp_rank", "world_rank"} <= set(context.SpawnRanks.__struct_fields__)
    modes = names_set_in("srt/model_executor/forward_batch_info.py", "ForwardMode")
    assert {"is_extend", "is_decode", "is_target_verify"} <= modes
