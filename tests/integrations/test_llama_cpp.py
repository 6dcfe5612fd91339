"""The draft model behind a `Llama` that does what llama-cpp-python's does; that package is not needed."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_model import plain, says

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.errors import ConfigError
from retrieve_spec.integrations.llama_cpp import DraftModel
from retrieve_spec.integrations.serving import ServingDrafter


class Llama:
    """What a draft model sees of one: the loop that samples at every drafted position, over a made-up model."""

    def __init__(self, draft_model, n_ctx=256, n_batch=32, recurrent=False, scores=None):
        self.draft_model, self.n_batch, self.model_path = draft_model, n_batch, "made-up.gguf"
        self._is_recurrent, self._is_hybrid = recurrent, False
        self._n_ctx = -(-n_ctx // 256) * 256  # llama.cpp rounds up
        self.input_ids = np.full(n_ctx, 77, np.intc)
        self.scores = np.empty((n_ctx if scores is None else scores, 1))
        self.steps = self.accepted = 0

    def n_ctx(self):
        return self._n_ctx

    def n_vocab(self):
        return 100

    def detokenize(self, tokens, special=False):
        return bytes(f"<{tokens[0]}>", "ascii")

    def generate(self, tokens, temp=0.0, logits_processor=None):
        known, fresh = 0, list(tokens)
        while True:
            assert len(fresh) <= self.n_batch or not known, "more than a batch holds"
            assert known + len(fresh) <= self._n_ctx, "more than the cache holds"
            at = known + len(fresh) - (len(fresh) if known else 1)
            self.input_ids[known : known + len(fresh)] = fresh
            known += len(fresh)
            self.steps += 1
            while at < known:
                token = says(self.input_ids[: at + 1])
                at += 1
                yield token
                if at < known and token != self.input_ids[at]:
                    known = at
                    break
                self.accepted += at < known
            fresh = [token]
            self.input_ids[known : known + 1] = fresh
            draft = self.draft_model(self.input_ids[: known + 1])
            assert draft.dtype == np.intc
            fresh.extend(draft.astype(int)[: self._n_ctx - known - 1])

    def write(self, prompt, count, **options):
        """The text of a prompt and so many tokens more."""
        text = list(prompt)
        for token in self.generate(prompt, **options):
            text.append(token)
            if len(text) == len(prompt) + count:
                return text


def test_texts_are_those_without_drafts():
    llama = Llama(DraftModel(num_pred_tokens=9))
    for i, (length, count) in enumerate([(1, 40), (9, 1), (30, 200), (30, 30), (31, 30), (5, 251)]):
        prompt = [10 * i + j % 9 for j in range(length)]
        assert llama.write(prompt, count) == plain(prompt, count)
    assert llama.accepted > llama.steps
    assert llama.draft_model.statistics()["failures"] == 0
    assert llama.draft_model.statistics()["under_way"] == 1, "texts that ended are forgotten"


class Naive:
    """The plain way: a drafter of one request is told what happens to texts, which it keeps as lists."""

    def __init__(self, session):
        self.drafter = ServingDrafter(SpeculationConfig(session=session, min_path_probability=0.05))
        self.texts, self.drafted, self.count = {}, {}, 0

    def draft(self, who, ids):
        old = self.texts.get(who)
        if old and ids[: len(old[1])] == old[1] and len(ids) - len(old[1]) <= self.drafted[who] + 1:
            name = old[0]
            self.drafter.feed(name, ids[len(old[1]) :])
        else:
            if old:
                self.drafter.finish(old[0])
            self.count += 1
            name = str(self.count)
            self.drafter.start(name, ids[: max(len(ids) - 1, 1)])
            self.drafter.feed(name, ids[max(len(ids) - 1, 1) :])
        self.texts[who] = name, ids
        draft = self.drafter.draft([name], 6)[0].token_ids.tolist()
        self.drafted[who] = len(draft)
        return draft


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.integers(1, 3))
def test_state_follows_what_texts_say(seed, session, llamas):
    """Texts that go on as drafted and otherwise, are taken back, edited, replaced, continued; several in turn."""
    rng = np.random.default_rng(seed)
    ours, naive = DraftModel(num_pred_tokens=6, session=session), Naive(session)
    ours.drafter.measured = lambda seconds: None  # drafts are to depend on texts alone
    askers = [Llama(ours) for _ in range(llamas)]
    texts = [rng.integers(0, 5, 9).tolist() for _ in askers]
    drafts = [[] for _ in askers]
    for _ in range(60):
        who = int(rng.integers(llamas))
        text, at = texts[who], int(rng.integers(len(texts[who])))
        fresh = rng.integers(0, 5, 30).tolist()
        ways = {
            "goes on": text + drafts[who][: int(rng.integers(0, 7))] + fresh[:1],
            "back": text[: at + 1],
            "edit": [*text[:at], *fresh[:1], *text[at + 1 :]],
            "new": fresh[: int(rng.integers(1, 30))],
            "turn": text + fresh[:20],
            "again": text,
        }
        text = ways[rng.choice(["goes on"] * 6 + ["back", "edit", "new", "turn", "again"])]
        texts[who] = text
        drafts[who] = called(askers[who], text)
        assert drafts[who] == naive.draft(who, text)
    ours.close()
    for name in sorted((name for name, _ in naive.texts.values()), key=int):
        naive.drafter.finish(name)
    wanted, got = naive.drafter.statistics(), ours.statistics()
    assert got["failures"] == 0
    for name in ("requests", "steps", "drafted", "accepted", "emitted", "under_way"):
        assert got[name] == wanted[name]
    if session:
        kept = [[text.tolist() for text in drafter.session.texts] for drafter in (ours.drafter, naive.drafter)]
        assert kept[0] == kept[1]


def called(llama, text):
    """What the draft model of a `Llama` says when `generate` calls it."""

    def generate(self):
        return self.draft_model(np.array(text, np.intc)).tolist()

    return generate(llama)


def test_what_cannot_be_verified_goes_without_drafts(caplog):
    prompt = list(range(9)) * 3
    llama = Llama(DraftModel(), recurrent=True)
    assert llama.write(prompt, 30) == plain(prompt, 30) and llama.steps == 30
    assert caplog.text.count("recurrent state") == 1
    llama = Llama(DraftModel())
    llama.write(prompt, 30, logits_processor=[lambda ids, scores: scores])
    assert llama.steps == 30
    with pytest.raises(ConfigError, match="Pass logits_all=True"):
        Llama(DraftModel(), scores=32).write(prompt, 30)


def test_an_expected_answer_is_drafted_once():
    llama = Llama(DraftModel())
    llama.draft_model.expect([60, 61, 62, 63, 64, 65, 66, 67])
    assert called(llama, [99, 60, 61])[:4] == [62, 63, 64, 65]
    assert called(llama, [98, 60, 61]) == []


def test_a_failure_leaves_the_text_and_ends_drafting(caplog, monkeypatch):
    llama = Llama(DraftModel())
    monkeypatch.setattr(llama.draft_model.drafter, "draft", lambda *_: 1 / 0)
    with caplog.at_level(logging.CRITICAL):
        assert llama.write(list(range(9)) * 3, 30) == plain(list(range(9)) * 3, 30)
    assert llama.draft_model.statistics()["failures"] == 3
    assert called(llama, []) == []


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="num_pred_tokens from 1"):
        DraftModel(num_pred_tokens=0)
