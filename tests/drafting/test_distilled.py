"""Distilled tables: what a model was asked lies beside a store, and is drafted where a text has shown nothing."""

import json
import random
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from threading import Timer

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from filelock import FileLock
from processes import running

import retrieve_spec as rs
from retrieve_spec import distilling
from retrieve_spec.cli import cli
from retrieve_spec.datastore.build import add_documents, create_datastore
from retrieve_spec.datastore.distilled import add_distilled, distilled_of
from retrieve_spec.datastore.edit import compact_datastore, merge_datastores, retokenize_datastore
from retrieve_spec.datastore.inspection import verify_datastore
from retrieve_spec.datastore.manifest import write_manifest
from retrieve_spec.datastore.observations import Observations, keys_of_tokens
from retrieve_spec.datastore.share import pull_datastore, push_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.distilling import distil, general_prompts
from retrieve_spec.drafting.drafter import Budget
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.engine import first_passes
from retrieve_spec.errors import (
    BuildError,
    ConfigError,
    StoreCorruptError,
    StoreLockedError,
    TokenizerMismatchError,
    TraceError,
)
from retrieve_spec.sources import SOURCE_NAMES
from retrieve_spec.sources.distilled import ModelTables


def said(*contexts):
    """Observations of texts that are these contexts, each followed by two tokens."""
    parts = []
    for context, top in contexts:
        top_ids = np.array([*((token, 9) for token in context[1:]), top], np.int32)
        probs = np.full(top_ids.shape, [0.75, 0.125], np.float16)
        parts.append(Observations(np.array(context, np.int32), np.array([len(context)]), top_ids, probs))
    return Observations.joined(parts)


def keep(store, observations, model="model:1"):
    """Keep a table of them beside a store, and return the store with it."""
    add_distilled(observations, 1 << 8, store.path, model)
    return open_datastore(store.path)


def folder_of(store, model="model:1"):
    """Where the table of a model lies."""
    [name] = [entry.name for entry in store.manifest.distilled if entry.model == model]
    return store.path / "distilled" / name


def first_tokens(store, last):
    """What is drafted first after a text of one token."""
    drafter = MixtureDrafter(datastores=[store])
    drafter.start(np.array([last], np.int32))
    return drafter.propose(Budget(2, 1)).token_ids.tolist()


@pytest.fixture
def store(make_store):
    """A store of a text that says nothing about other tokens."""
    return make_store([[90, 91, 92, 93] * 4])


def test_first_draft_of_a_text_is_what_the_model_was_asked(store):
    store = keep(store, said(([5], (7, 9)), ([5, 7], (30, 31)), *[([1, 5, 7], (40, 31))] * 9))
    drafter = MixtureDrafter(datastores=[store])
    drafter.start(np.array([1, 5], np.int32))
    tree = drafter.propose(Budget(4, 2))
    paths = [(int(tree.parent[i]), int(tree.token_ids[i])) for i in range(len(tree))]
    assert paths[:2] == [(-1, 7), (0, 40)], "the longest context comes first"
    assert {SOURCE_NAMES[number] for number in tree.source} == {"distilled"}


def test_after_a_token_that_was_never_met_the_one_before_it_says_what_may_follow(store):
    store = keep(store, said(([5, 7], (30, 31)), ([5, 8], (30, 32))))
    drafter = MixtureDrafter(datastores=[store])
    drafter.start(np.array([5, 60], np.int32))
    assert drafter.propose(Budget(1, 1)).token_ids.tolist() == [30]


def test_what_the_model_says_comes_before_a_text_that_matches_as_many_tokens(store):
    store = keep(store, said(([7], (40, 9))))
    drafter = MixtureDrafter(datastores=[store])
    drafter.start(np.array([token for other in range(60, 68) for token in (7, 30, other)] + [7], np.int32))
    assert drafter.propose(Budget(2, 1)).token_ids.tolist() == [40, 30]


def test_what_a_model_says_later_is_added_to_its_table(store):
    keep(store, said(([5], (7, 9))))
    keep(store, said(([6, 8], (8, 9))))
    store = keep(store, said(([6], (3, 9))), "model:2")
    assert [(entry.model, entry.tokens) for entry in store.manifest.distilled] == [("model:1", 3), ("model:2", 1)]
    assert len(ModelTables([store]).tables) == len(list((store.path / "distilled").iterdir())) == 2
    assert sum(path.stat().st_size for path in folder_of(store).iterdir()) < 4000, "as large as what it holds"
    found = distilled_of(store.path, store.manifest, "model:1").contexts
    assert sorted(found.top_ids.tolist()) == [[7, 9], *[[8, 9]] * 4] and found.counts.tolist() == [1] * 5
    assert distilled_of(store.path, store.manifest, "model:3").contexts is None


@pytest.mark.parametrize(
    ("name", "size"), [("sets", 0), ("sets", 32), ("sets", 24 * 8), ("entries", 8), ("entries", 0)]
)
def test_a_table_whose_files_do_not_fit_each_other_is_left_out(store, caplog, name, size):
    """Sizes and checksums are as the manifest says, as of a store that somebody else has made."""
    store = keep(store, said(([5], (7, 9))))
    [entry] = store.manifest.distilled
    path = folder_of(store) / name
    content = (path.read_bytes() * 9)[:size]
    path.unlink()  # the store's readers may have mapped it
    path.write_bytes(content)
    files = entry.files | {name: replace(entry.files[name], bytes=size, sha256=sha256(content).hexdigest())}
    write_manifest(store.path, replace(store.manifest, distilled=(replace(entry, files=files),)))
    assert ModelTables([open_datastore(store.path)]).tables == []
    assert "not drafted from" in caplog.text and "contexts" in caplog.text
    with pytest.raises(StoreCorruptError, match="a power of two of contexts"):
        keep(store, said(([6], (8, 9))))


@pytest.mark.parametrize("damage", ["sets", "entries"])
def test_a_damaged_table_is_left_out(store, caplog, damage):
    store = keep(store, said(([5], (7, 9))))
    path = folder_of(store) / damage
    path.write_bytes(path.read_bytes()[:-40])
    assert ModelTables([store]).tables == []
    assert "not drafted from" in caplog.text and damage in caplog.text


def test_nothing_is_added_to_a_damaged_table(store):
    store = keep(store, said(([5], (7, 9))))
    path = folder_of(store) / "entries"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(StoreCorruptError, match="entries"):
        keep(store, said(([6], (8, 9))))


def test_a_table_without_one_of_its_files_is_a_damaged_store(store, tmp_path):
    store = keep(store, said(([5], (7, 9))))
    (folder_of(store) / "entries").unlink()
    for change in (
        verify_datastore,
        lambda path: add_distilled(said(([6], (8, 9))), 1 << 8, path, "model:1"),
        lambda path: push_datastore(path, f"file://{tmp_path}/remote"),
    ):
        with pytest.raises(StoreCorruptError, match="entries, got no such file"):
            change(store.path)


def test_tables_stay_when_a_store_changes_and_go_with_its_tokenizer(store, reference_tokenizer, tmp_path):
    keep(store, said(([5], (7, 9))))
    (tmp_path / "more.txt").write_text("more of it")
    add_documents(store.path, str(tmp_path / "more.txt"))
    compact_datastore(store.path)
    assert first_tokens(open_datastore(store.path), 5) == [7, 9]
    verify_datastore(store.path)
    retokenize_datastore(store.path, reference_tokenizer)
    assert not open_datastore(store.path).manifest.distilled and not list((store.path / "distilled").iterdir())


def test_tables_are_pushed_pulled_and_merged(make_store, tmp_path):
    store, url = make_store([[90, 91, 92, 93] * 4]), f"file://{tmp_path}/remote"
    keep(store, said(([5], (7, 9))))
    push_datastore(store.path, url)
    assert "what model `model:1` says, distilled from 1 tokens" in (tmp_path / "remote" / "README.md").read_text()
    pull_datastore(url, tmp_path / "pulled")
    assert first_tokens(open_datastore(tmp_path / "pulled"), 5) == first_tokens(open_datastore(url), 5) == [7, 9]

    store = keep(store, said(([5, 6], (8, 9))))
    assert push_datastore(store.path, url).files == 2, "the table's files alone are new"
    own = keep(make_store([[80, 81, 82] * 4]), said(([6], (3, 9))), "model:2")
    for joined in (tmp_path / "pulled", own.path):
        pull_datastore(url, joined)
        verify_datastore(joined)
        assert first_tokens(open_datastore(joined), 5) == [6, 7]
    assert {entry.model for entry in open_datastore(own.path).manifest.distilled} == {"model:1", "model:2"}
    merge_datastores(tmp_path / "merged", [store.path, own.path])
    assert {entry.model for entry in open_datastore(tmp_path / "merged").manifest.distilled} == {"model:1", "model:2"}


def test_tables_of_one_model_become_one(make_store, tmp_path):
    """Of two machines that went on with copies of one store."""
    url = f"file://{tmp_path}/remote"
    first, second = keep(make_store([[90, 91]]), said(([5], (7, 9)))), make_store([[80, 81]])
    push_datastore(first.path, url)
    pull_datastore(url, second.path)
    keep(first, said(([6], (8, 9)))), keep(second, said(([4], (3, 9))))
    keep(second, said(([1], (2, 9))), "model:2")
    merge_datastores(tmp_path / "merged", [first.path, second.path])
    push_datastore(first.path, url)
    pull_datastore(url, second.path)
    for folder in (tmp_path / "merged", second.path):
        verify_datastore(folder)
        joined = open_datastore(folder)
        assert sorted((entry.model, entry.tokens) for entry in joined.manifest.distilled) == [
            ("model:1", 4), ("model:2", 1)
        ]  # fmt: skip
        assert [first_tokens(joined, last)[0] for last in (4, 5, 6)] == [3, 7, 8]


def test_a_store_tells_which_models_it_has_and_how_much_of_each(reference_model, reference_tokenizer, tmp_path):
    text = "def f(a):\n    return a\n" * 40
    for name in ("one", "other"):
        distil(reference_model, reference_tokenizer, tmp_path / name, prompts=[], texts=[text])
    merge_datastores(tmp_path / "both", [tmp_path / "one", tmp_path / "other"])
    for name, texts in (("one", 1), ("both", 2)):
        manifest = open_datastore(tmp_path / name).manifest
        [table] = manifest.distilled
        found = distilled_of(tmp_path / name, manifest, table.model)
        told = CliRunner().invoke(cli, ["info", str(tmp_path / name)]).output
        model = Path(reference_model.name_or_path).name
        assert f"  distilled  {model} ({table.model[7:19]}), {table.tokens:,} tokens" in told
        assert f", {len(found.contexts.keys):,} contexts, {len(found.states.keys):,} hidden states, " in told
        assert table.tokens >= texts * len(reference_tokenizer(text).input_ids)


def test_a_store_with_tables_is_of_a_format_that_earlier_versions_refuse(store):
    formats = [json.loads((store.path / "manifest.json").read_text())["format"]]
    keep(store, said(([5], (7, 9))))
    formats.append(json.loads((store.path / "manifest.json").read_text())["format"])
    assert formats == [3, 4] and open_datastore(store.path).manifest.distilled


def test_a_table_alone_is_a_store_to_pull_and_merge(numbers, tmp_path):
    url = f"file://{tmp_path}/remote"
    create_datastore(tmp_path / "store", numbers)
    add_distilled(said(([5], (7, 9))), 1 << 8, tmp_path / "store", "model:1")
    push_datastore(tmp_path / "store", url)
    pull_datastore(url, tmp_path / "pulled")
    merge_datastores(tmp_path / "merged", [tmp_path / "store"])
    for folder in ("pulled", "merged"):
        assert first_tokens(open_datastore(tmp_path / folder), 5) == [7, 9]


def test_a_first_pull_is_done_again_after_a_kill(store, tmp_path):
    """A kill leaves what was there when it came, before the manifest."""
    url, made = f"file://{tmp_path}/remote", tmp_path / "pulled"
    keep(store, said(([5], (7, 9))))
    push_datastore(store.path, url)
    pull_datastore(url, made)
    (made / "manifest.json").unlink()
    (made / "remotes.json").unlink()
    (made / "remotes.json.lock").unlink(missing_ok=True)
    pull_datastore(url, made)
    verify_datastore(made)
    assert first_tokens(open_datastore(made), 5) == [7, 9]


def test_tokens_of_another_model_are_never_drafted(store, reference_model, reference_tokenizer):
    """Ids that the model does not have may stand in a table of another one."""
    ids = reference_tokenizer("def f(", return_tensors="pt").input_ids
    last = int(ids[0, -1])
    store = keep(store, said(([last], (1 << 20, 9))))
    plain = reference_model.generate(ids, max_new_tokens=8, do_sample=False)
    drafter = MixtureDrafter(datastores=[store])
    rs.accelerate(reference_model, reference_tokenizer, drafter=drafter, nodes=8)
    assert torch.equal(reference_model.generate(ids, max_new_tokens=8, do_sample=False), plain)


PROMPTS = ["def add(a, b):", "class Stack:", "import os\n"]


@pytest.mark.slow
def test_a_distilled_store_drafts_from_the_first_pass_and_changes_no_text(
    reference_model, reference_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(distilling, "_ANSWER", 64)
    report = distil(reference_model, reference_tokenizer, tmp_path / "store", prompts=PROMPTS, texts=["x = 1\n" * 40])
    assert report.answers >= 3 and report.contexts > 100 and report.tokens > 200
    more = distil(reference_model, reference_tokenizer, tmp_path / "store", prompts=["while True:"])
    assert more.contexts > report.contexts, "an earlier run is gone on with"
    store = open_datastore(tmp_path / "store")
    assert store.manifest.documents >= 2
    assert [entry.model for entry in store.manifest.distilled] == [_fingerprint(reference_model)]

    ids = reference_tokenizer("def add(a, b):\n    return", return_tensors="pt").input_ids
    options = {"max_new_tokens": 40, "do_sample": False, "nodes": 16}
    rs.accelerate(reference_model, reference_tokenizer)
    plain = reference_model.generate(ids, **options)
    without = reference_model.speculation.last.passes
    rs.accelerate(reference_model, reference_tokenizer, datastores=[store])
    assert torch.equal(reference_model.generate(ids, **options), plain)
    last = reference_model.speculation.last
    assert last.accepted_by_source.get("distilled", 0) > 0 and last.passes <= without


def test_a_store_knows_what_follows_each_token_that_the_model_never_wrote(
    reference_model, reference_tokenizer, tmp_path
):
    token = 5000
    distil(reference_model, reference_tokenizer, tmp_path / "store", prompts=[], texts=["x = 1\n"], max_tokens=8)
    line_end = reference_tokenizer("\n").input_ids
    says = reference_model(torch.tensor([[*line_end, *line_end, token]])).logits[0, -1].topk(2).indices.tolist()
    assert first_tokens(open_datastore(tmp_path / "store"), token) == says


@pytest.fixture
def never_asked(tmp_path, monkeypatch):
    """No bigrams are kept, and models are not asked for any when they are accelerated."""
    monkeypatch.setattr(first_passes, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(first_passes, "ASKED_SECONDS", 0.0)
    monkeypatch.setattr(first_passes, "ASKED_AGAIN_SECONDS", 0.0)


@pytest.mark.usefixtures("never_asked")
def test_asking_shows_its_progress_and_goes_on_where_it_was_interrupted(reference_model, reference_tokenizer, tmp_path):
    run = partial(distil, reference_model, reference_tokenizer, tmp_path / "store", texts=["x = 1\n"])
    shown = []

    def interrupt(report):
        shown.append(report.asked)
        if report.asked > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(on_progress=interrupt)
    assert shown == sorted(shown) and len(set(shown)) > 2
    assert run(minutes=1e-9).asked == shown[-1]


@pytest.mark.usefixtures("never_asked")
def test_asking_leaves_time_for_answers(reference_model, reference_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(distilling, "_ASKED_SHARE", 0.0)
    report = distil(reference_model, reference_tokenizer, tmp_path / "store", prompts=["def f("], max_tokens=8)
    assert report.asked == 0 and report.answers == 1


@pytest.mark.usefixtures("never_asked")
def test_a_later_run_asks_for_tokens_for_which_the_time_was_too_short(reference_model, reference_tokenizer, tmp_path):
    token, run = 5000, partial(distil, reference_model, reference_tokenizer, tmp_path / "store", texts=["x = 1\n"])
    assert run(minutes=1e-9).asked == 0
    before = first_tokens(open_datastore(tmp_path / "store"), token)
    run(max_tokens=8)
    [table] = open_datastore(tmp_path / "store").manifest.distilled
    run(max_tokens=8)
    [last] = open_datastore(tmp_path / "store").manifest.distilled
    assert before != first_tokens(open_datastore(tmp_path / "store"), token)
    assert last.tokens - table.tokens < 100, "what the store has is not added again"


def test_answers_of_a_model_that_nothing_drafts_for_are_read(
    reference_model, reference_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(reference_model.generation_config, "num_beams", 2)
    report = distil(reference_model, reference_tokenizer, tmp_path / "store", prompts=["def f("], max_tokens=8)
    assert report.tokens == 8 and report.contexts > 8


def test_a_model_that_names_no_output_embeddings_makes_a_table_without_states(
    reference_model, reference_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(reference_model, "get_output_embeddings", lambda: None)
    report = distil(reference_model, reference_tokenizer, tmp_path / "store", prompts=["def f("], max_tokens=8)
    assert report.tokens == 8 and report.contexts > 8
    assert ModelTables([open_datastore(tmp_path / "store")]).states is None


def test_a_later_run_asks_what_the_earlier_one_did_not(reference_model, reference_tokenizer, tmp_path):
    random.seed(1)  # a few prompts, of thousands, have the same answer or an empty one
    runs = [distil(reference_model, reference_tokenizer, tmp_path / "store", max_tokens=30) for _ in range(2)]
    assert open_datastore(tmp_path / "store").manifest.documents == sum(run.answers for run in runs)
    again = distil(reference_model, reference_tokenizer, tmp_path / "store", prompts=["def f("], max_tokens=8)
    same = distil(reference_model, reference_tokenizer, tmp_path / "store", prompts=["def f("], max_tokens=8)
    assert again.answers == same.answers == 1, "an answer that the store has is no error"


def test_runs_of_which_none_knows_the_other_ask_other_prompts(reference_model, reference_tokenizer, tmp_path):
    random.seed(1)  # a few prompts, of thousands, have the same answer or an empty one
    apart = [tmp_path / "one", tmp_path / "other"]
    runs = [distil(reference_model, reference_tokenizer, store, max_tokens=30) for store in apart]
    merge_datastores(tmp_path / "both", apart)
    assert open_datastore(tmp_path / "both").manifest.documents == sum(run.answers for run in runs)


def test_what_another_process_writes_meanwhile_is_waited_for_and_kept(reference_model, reference_tokenizer, tmp_path):
    store, texts = tmp_path / "store", ["x = 1\n" * 9]
    read = distil(reference_model, reference_tokenizer, store, prompts=[], texts=texts).tokens
    [before] = open_datastore(store).manifest.distilled
    lock = FileLock(store / "lock", thread_local=False)
    eight = Observations(
        np.ones(1, np.int32), np.ones(1, np.int64), np.arange(8, dtype=np.int32)[None], np.ones((1, 8), np.float16)
    )

    def write(report):  # which has written a table, and goes on writing when the work is done
        add_distilled(eight, 1 << 16, store, before.model)
        lock.acquire()
        Timer(2.0, lock.release).start()

    distil(reference_model, reference_tokenizer, store, prompts=[], texts=texts, on_progress=write)
    [after] = open_datastore(store).manifest.distilled
    found = distilled_of(store, open_datastore(store).manifest, before.model).contexts
    [at] = np.flatnonzero(found.keys == keys_of_tokens(2)[1])
    assert found.counts[at] == 2, "asked once, and written by the other process"
    assert after.tokens >= before.tokens + 1 + read


def test_a_store_that_stays_locked_is_an_error_in_the_end(store, monkeypatch):
    monkeypatch.setattr(distilling, "_AGAIN_S", 0.0)
    with FileLock(store.path / "lock"), pytest.raises(StoreLockedError, match="another process is writing"):
        distilling._when_free(partial(keep, store, said(([5], (6, 7)))), patience=0.0)


def test_what_is_saved_in_between_is_added_once(reference_model, reference_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(distilling, "_ANSWER", 40)

    def run(name, seconds):
        """What the store has in the end, and what it had meanwhile."""
        monkeypatch.setattr(distilling, "SAVED_EVERY_S", seconds)
        texts, path, seen = ["x = 1\n" * 20, "def f(a):\n    return a\n" * 20], tmp_path / name, []

        def look(report):
            if path.exists():
                seen.append((report.contexts, open_datastore(path).manifest.documents))

        report = distil(reference_model, reference_tokenizer, path, prompts=PROMPTS, texts=texts, on_progress=look)
        verify_datastore(path)
        manifest = open_datastore(path).manifest
        [table] = manifest.distilled
        found = distilled_of(path, manifest, table.model)
        assert report.contexts == len(found.contexts.keys) and report.answers == manifest.documents
        return (report.answers, report.contexts, table.tokens, len(found.states.keys)), seen

    often, seen = run("often", 0.0)
    assert seen[-1][0] and seen[-1][1] == often[0] > 1
    assert run("in the end", 1e9) == (often, [])


def test_what_cannot_be_saved_while_another_process_writes_is_saved_next_time(
    reference_model, reference_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(distilling, "SAVED_EVERY_S", 0.0)
    store, seen = tmp_path / "store", []
    distil(reference_model, reference_tokenizer, store, prompts=[], texts=["x = 1\n"])
    lock = FileLock(store / "lock")

    def look(report):
        seen.append(report.contexts)
        if len(seen) == 1:
            lock.acquire()
        else:
            lock.release(force=True)

    distil(
        reference_model, reference_tokenizer, store, prompts=[], texts=["y = 2\n", "z\n", "w = 4\n"], on_progress=look
    )
    assert 0 < seen[0] == seen[1] < seen[2]


KILLED = """
import sys
from retrieve_spec import distilling
from retrieve_spec.reference_model import load_model
distilling.SAVED_EVERY_S = 0.0
distilling.distil(*load_model(), sys.argv[1], on_progress=lambda report: print(report.contexts, flush=True))
"""


@pytest.mark.slow
def test_what_was_saved_is_there_after_a_kill_and_gone_on_with(reference_model, reference_tokenizer, tmp_path):
    store = tmp_path / "store"
    with running([sys.executable, "-c", KILLED, str(store)], stdout=subprocess.PIPE, text=True) as child:
        next(line for line in child.stdout if int(line))
        child.send_signal(signal.SIGKILL)
    assert verify_datastore(store)["documents"] > 0
    [before] = open_datastore(store).manifest.distilled
    report = distil(reference_model, reference_tokenizer, store, max_tokens=30)
    [after] = open_datastore(store).manifest.distilled
    assert after.tokens >= before.tokens + report.tokens
    verify_datastore(store)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_what_came_before_a_stop_is_kept(reference_model, reference_tokenizer, tmp_path, stop):
    def texts(*said):
        yield from said
        raise stop

    run = partial(distil, reference_model, reference_tokenizer, tmp_path / "store", prompts=[])
    with pytest.raises(stop):
        run(texts=texts())
    assert not (tmp_path / "store").exists()
    with suppress(ValueError):
        run(texts=texts("x = 1\n"), max_tokens=100)
    assert open_datastore(tmp_path / "store").manifest.distilled


def test_a_text_is_read_up_to_the_limit(reference_model, reference_tokenizer, tmp_path):
    report = distil(reference_model, reference_tokenizer, tmp_path / "store", texts=["x = 1\n" * 9], max_tokens=8)
    assert report.tokens == 8


def test_texts_alone_make_a_store(reference_model, reference_tokenizer, tmp_path):
    distil(reference_model, reference_tokenizer, tmp_path / "store", prompts=[], texts=["x = 1\n" * 9])
    store = open_datastore(tmp_path / "store")
    assert not store.manifest.documents and len(ModelTables([store]).tables) == 1


@pytest.mark.usefixtures("never_asked")
def test_an_accelerated_model_leaves_out_the_table_of_another(reference_model, reference_tokenizer, tmp_path, caplog):
    distil(reference_model, reference_tokenizer, tmp_path / "store", prompts=[], texts=["x = 1\n" * 9])
    add_distilled(said(([5], (6, 7))), 1 << 8, tmp_path / "store", "another")
    ids = reference_tokenizer("x = 1\n", return_tensors="pt").input_ids
    with caplog.at_level("INFO", "retrieve_spec"):
        rs.accelerate(reference_model, reference_tokenizer, datastores=[tmp_path / "store"])
        reference_model.generate(ids, max_new_tokens=4, do_sample=False)
    assert "another" in caplog.text and "left out" in caplog.text


def _fingerprint(model):
    from retrieve_spec.datastore.dense import model_fingerprint

    return model_fingerprint(model)


def test_the_command_stops_at_its_limit(tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "def f():"}) + "\n")
    given = [
        "distil",
        str(tmp_path / "store"),
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--tokens",
        "8",
        "--json",
    ]
    result = CliRunner().invoke(cli, given, catch_exceptions=False)
    assert result.exit_code == 0 and "answer" not in result.stderr, "progress is for terminals"
    told = json.loads(result.stdout)
    assert told["answers"] == 1 and told["tokens"] <= 8


@pytest.mark.parametrize("line", ["no JSON", '{"text": "x"}', '{"prompt": 5}'])
def test_a_line_that_is_no_prompt_is_named_before_anything_is_asked(tmp_path, line):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a\u2028b"}\n' + line + "\n")
    given = ["distil", str(tmp_path / "store"), "--prompts", str(tmp_path / "prompts.jsonl"), "-q"]
    error = CliRunner().invoke(cli, given).exception
    assert isinstance(error, TraceError) and "line 2 of" in str(error)


def test_a_store_is_looked_at_before_anything_is_asked(store, reference_model, reference_tokenizer, tmp_path):
    with pytest.raises(TokenizerMismatchError):
        distil(reference_model, reference_tokenizer, store.path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BuildError, match="notes"):
        distil(reference_model, reference_tokenizer, tmp_path)
    with pytest.raises(BuildError, match="address"):
        distil(reference_model, reference_tokenizer, f"file://{tmp_path}/store")


def test_what_is_asked_for(reference_model, reference_tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="power of two"):
        distil(reference_model, reference_tokenizer, tmp_path / "store", contexts=1000)
    with pytest.raises(ConfigError, match="prompts to ask or texts to read"):
        distil(reference_model, reference_tokenizer, tmp_path / "store", prompts=[])
    assert not (tmp_path / "store").exists()


def test_general_prompts_are_of_many_kinds_and_each_is_asked_once():
    prompts = list(islice(general_prompts(), 2000))
    assert len(set(prompts)) == 2000 and not any("{" in prompt for prompt in prompts)
    assert prompts == list(islice(general_prompts(), 2000)) != list(islice(general_prompts(seed=1), 2000))
