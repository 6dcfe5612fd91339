"""The proposer behind a runner that does what vLLM's does, as far as a proposer sees it; vLLM is not needed."""

import logging
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made_up_model import asked, distilled_store, plain, says

from retrieve_spec.errors import ConfigError, StoreNotFoundError
from retrieve_spec.integrations import hosted, vllm

LONGEST, ROWS = 200, 8


class LogitsProcessor(torch.nn.Module):
    """vLLM's module of this name, which makes logits of hidden states."""

    def forward(self, texts, hidden):
        logits = torch.zeros(len(texts), 100)
        for i, text in enumerate(texts):
            logits[i, says(text)] = 9.0
        return logits


class Runner:
    """Rows that are reused, prompts read in pieces, drafts verified, requests left out and taken back."""

    def __init__(self, options=None, most=8, **config):
        self.vllm_config = SimpleNamespace(
            additional_config={"retrieve_spec": {"any_version": True, **(options or {})}},
            speculative_config=SimpleNamespace(num_speculative_tokens=most),
            model_config=SimpleNamespace(max_model_len=LONGEST, get_vocab_size=lambda: 100),
            parallel_config=SimpleNamespace(
                rank=0, tensor_parallel_size=1, data_parallel_size=1, data_parallel_rank=0, **config
            ),
        )
        self.most = most
        self.requests, self.drafts = {}, {}
        self.input_batch = SimpleNamespace(req_ids=[])
        self.texts = np.zeros((ROWS, LONGEST), np.int32)
        self.passes = self.accepted = 0
        self.make()

    def make(self):
        self.drafter = vllm.Proposer(self.vllm_config)
        self.model = torch.nn.Sequential(LogitsProcessor())
        self.drafter.load_model(self.model)

    def execute_model(self):
        """Only there to be seen."""

    def add(self, name, prompt, max_tokens=40, temperature=0.0, **extra):
        self.requests[name] = SimpleNamespace(
            num_prompt_tokens=len(prompt),
            sampling_params=SimpleNamespace(max_tokens=max_tokens, temperature=temperature, extra_args=extra or None),
            prompt_embeds=None,
            text=list(prompt),
            read=0,
        )

    def step(self, names, piece=1000):
        """One step over rows of these requests: pieces of prompts are read, drafts verified."""
        sampled, read = [], []
        for name in names:
            request = self.requests[name]
            request.read = min(request.read + piece, request.num_prompt_tokens)
            if request.read < request.num_prompt_tokens:
                sampled.append([])
                read.append(request.text[: request.read])
                continue
            said, draft = [], self.drafts.pop(name, [])
            read += [[*request.text, *draft[:n]] for n in range(len(draft) + 1)]
            left = request.sampling_params.max_tokens - (len(request.text) - request.num_prompt_tokens)
            for token in [*draft, None]:
                said.append(says([*request.text, *said]))
                if said[-1] != token:
                    break
            sampled.append(said[:left])
            request.text += said[:left]
            self.passes += 1
            self.accepted += len(said) - 1
        self.model[0](read, torch.zeros(len(read), 3))
        self.input_batch.req_ids = list(names)
        for i, name in enumerate(names):
            text = self.requests[name].text
            self.texts[i, : len(text)] = text
            self.texts[i, len(text) :] = 77  # what an earlier row left
        lengths = np.array([len(self.requests[name].text) for name in names], np.int32)
        drafts = self.drafter.propose(sampled, lengths, self.texts, slot_mappings=None)
        assert len(drafts) == len(names)
        for name, said, draft in zip(names, sampled, drafts, strict=True):
            assert said or not draft, "who still reads a prompt verifies nothing"
            request = self.requests[name]
            left = request.sampling_params.max_tokens - (len(request.text) - request.num_prompt_tokens)
            assert all(isinstance(token, int) and 0 <= token < 100 for token in draft)
            assert len(draft) <= max(min(self.most, left - 1, LONGEST - len(request.text) - 1), 0)
            self.drafts[name] = draft
        return drafts

    def ended(self, name):
        request = self.requests[name]
        return len(request.text) - request.num_prompt_tokens >= request.sampling_params.max_tokens

    def finish(self, name):
        self.drafts.pop(name, None)
        return self.requests.pop(name).text

    def write(self, name):
        while not self.ended(name):
            self.step([name])
        return self.finish(name)


def served(runner, wanted, rng, rows=4, piece=1000):
    """Serve requests in changing rows, some of them left out of steps, until all have ended."""
    waiting, texts = list(wanted), {}
    while waiting or runner.requests:
        while waiting and len(runner.requests) < rows:
            name = waiting.pop(0)
            runner.add(name, **wanted[name])
        names = [name for name in rng.permutation(sorted(runner.requests)).tolist() if rng.random() < 0.8]
        if not names:
            continue
        runner.step(names, piece)
        if rng.random() < 0.1:  # preempted: its draft is dropped, its prompt and answer are read again
            victim = str(rng.choice(names))
            runner.drafts.pop(victim, None)
        for name in names:
            if runner.ended(name):
                texts[name] = runner.finish(name)
    return texts


@pytest.mark.parametrize(("seed", "piece"), [(0, 1000), (1, 7), (2, 1)])
def test_texts_are_those_without_drafts(seed, piece):
    rng = np.random.default_rng(seed)
    runner = Runner({"session": seed == 2})
    wanted = asked(12, "max_tokens")
    for i, request in enumerate(wanted.values()):
        request["temperature"] = float(i % 2)
    texts = served(runner, wanted, rng, piece=piece)
    assert texts == {name: plain(*list(request.values())[:2]) for name, request in wanted.items()}
    assert runner.accepted > runner.passes / 2
    counts = runner.drafter.statistics()
    assert counts["failures"] == 0 and counts["requests"] == 12
    runner.add("last", [1])
    runner.step(["last"])
    assert runner.drafter.statistics()["under_way"] == 1, "those that ended are forgotten"


def test_tokens_that_are_taken_back():
    runner = Runner({"session": True})
    runner.add("a", list(range(9)) * 3)
    for _ in range(3):
        runner.step(["a"])
    request = runner.requests["a"]
    del request.text[-2:]
    runner.drafts.clear()
    assert runner.write("a") == plain(list(range(9)) * 3)
    assert runner.drafter.statistics()["failures"] == 0
    assert not len(runner.drafter.drafter.session), "they are nobody's answer"


def test_a_distilled_store_is_drafted_from_before_a_text_has_shown_anything(tmp_path, monkeypatch):
    """The model's own top tokens, which engines that hold the model cannot be asked for."""
    said = np.array(plain([60], 8))
    store = distilled_store(tmp_path / "store", [said[:-1]], np.stack([said[1:], np.full(8, 99)], 1))
    monkeypatch.setattr(vllm, "_tokenizer_of", lambda config: None)
    runner = Runner({"datastores": str(store)}, most=4)
    runner.add("a", [60])
    assert runner.step(["a"]) == [plain([60])[2:6]]
    assert runner.write("a") == plain([60])


def test_what_the_model_says_after_rejected_tokens_is_drafted_when_these_come():
    """The expected text goes round the wrong way, and shows the model tokens that it has not said."""
    runner = Runner()
    runner.add("a", [60], retrieve_spec_prediction=[61, 65, 67, 61, 63, 65, 67, 61])
    assert runner.step(["a"]) == [[61, 63, 65, 67, 61]] and runner.step(["a"]) == [[63, 61, 68]]
    assert runner.write("a") == plain([60]) and plain([60], 5) == [60, 67, 65, 63, 61, 68]


def test_wishes_of_requests(caplog):
    runner = Runner({"session": True})
    runner.add("off", list(range(9)) * 3, retrieve_spec_draft=0)
    assert runner.step(["off"]) == [[]]
    runner.add("predicted", [60], retrieve_spec_prediction=[69, 61, 63, 65, 67, 61, 62, 63])
    runner.step(["off", "predicted"])
    runner.add("wrong", [30, 31], retrieve_spec_prediction={"no": "text"})
    assert runner.step(["off", "wrong"])[1] == [] and "goes without drafts" in caplog.text
    runner.add("secret", [80, 81, 82], retrieve_spec_keep="false")
    for _ in range(4):
        runner.step(["secret"])
    runner.add("pictures", [1, 2, 3] * 5)
    runner.requests["pictures"].prompt_embeds = object()
    runner.add("placeholders", [1, -1, 2])
    assert runner.step(["pictures", "placeholders"]) == [[], []]
    assert runner.drafter.statistics()["failures"] == 0
    for name in list(runner.requests):
        runner.finish(name)
    runner.add("other", [85, 80])
    runner.step(["other"])
    remembered = np.concatenate([*runner.drafter.drafter.session.texts, np.empty(0, np.int32)])
    assert not (remembered >= 80).any() and (remembered // 10 == 6).any()


def test_a_failure_leaves_the_answer_and_ends_drafting(caplog, monkeypatch):
    runner = Runner()
    monkeypatch.setattr(runner.drafter.drafter, "step", lambda *_: 1 / 0)
    runner.add("a", list(range(9)) * 3)
    with caplog.at_level(logging.CRITICAL):
        assert runner.write("a") == plain(list(range(9)) * 3)
    assert runner.drafter.statistics()["failures"] == 3


@pytest.mark.parametrize("fails", [False, True])
def test_logits_are_not_kept_for_the_next_pass(monkeypatch, fails):
    """They can have gigabytes; also when drafting is off."""
    runner, made = Runner(), []
    runner.model[0].register_forward_hook(lambda module, inputs, logits: made.append(weakref.ref(logits)))
    if fails:
        monkeypatch.setattr(runner.drafter.drafter, "step", lambda *_: 1 / 0)
    runner.add("a", list(range(9)) * 3)
    for _ in range(5):
        runner.step(["a"])
    assert made.pop()() is None


def test_a_model_that_names_the_hidden_states_it_makes_logits_of():
    runner = Runner()
    [processor] = runner.model
    processor(texts=[[1, 2]], hidden=torch.zeros(1, 3))
    runner.add("a", list(range(9)) * 3)
    assert runner.write("a") == plain(list(range(9)) * 3)


def test_ranks_that_only_follow_draft_nothing_and_replicas_keep_states_of_their_own(tmp_path):
    runner = Runner({"state": str(tmp_path)})
    parallel = runner.vllm_config.parallel_config
    parallel.data_parallel_size, parallel.data_parallel_rank = 2, 1
    runner.make()
    assert [path.name for path in tmp_path.iterdir()] == ["replica1"]
    parallel.rank, parallel.tensor_parallel_size = 1, 2
    runner.vllm_config.additional_config["retrieve_spec"]["state"] = "/nowhere/at/all"
    runner.make()
    assert runner.drafter.propose([[1]], np.array([5]), np.zeros((1, 9), np.int32)) == [[]]


def test_mistakes_are_named(monkeypatch):
    with pytest.raises(ConfigError, match="Use datastores, session"):
        Runner({"datastore": "x"})
    monkeypatch.setattr(vllm, "_tokenizer_of", lambda config: None)
    with pytest.raises(StoreNotFoundError):
        Runner({"datastores": "/nowhere"})
    with pytest.raises(ConfigError, match="made by vLLM's model runner"):
        vllm.Proposer(Runner().vllm_config)
    monkeypatch.setattr(hosted, "version", lambda name: "0.33.0")
    with pytest.raises(ConfigError, match=r"vLLM 0\.32, got 0\.33\.0"):
        Runner({"any_version": False})
    Runner({"any_version": True})
    monkeypatch.setattr(hosted, "version", lambda name: "0.32.1")
    Runner({"any_version": False})
