"""The draft model inside llama-cpp-python, over the bundled model on a CPU; `make test-llama-cpp` runs these."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("llama_cpp", reason="llama-cpp-python has an environment of its own: make test-llama-cpp")
pytest.importorskip("gguf", reason="llama-cpp-python has an environment of its own: make test-llama-cpp")

from llama_cpp import Llama, LlamaGrammar, LogitsProcessorList
from recorded_texts import built_store, recorded_texts
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM

import retrieve_spec
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.errors import ConfigError, TokenizerMismatchError
from retrieve_spec.integrations.llama_cpp import DraftModel

PACKAGE = Path(retrieve_spec.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
CONTEXT = 768
ODD = [
    "",
    " ",
    "\n\n\n  x",
    "a\tb\r\nc\r\r\n",
    "naïve Ω ≈ 漢字 🦙🏽 e\u0301 \u00a0\u2003x",
    "I'LL we'Ve don'T",
    "x=12345+0x1F  # ----\n",
    "<|fim_prefix|>def f(<|fim_suffix|>    return 1\n<|fim_middle|>",
]


def llama(gguf, **given):
    return Llama(
        gguf, **{"n_ctx": CONTEXT, "n_batch": 128, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **given}
    )


@pytest.fixture(scope="module")
def plain(gguf):
    return llama(gguf)


@pytest.fixture(scope="module")
def ours(gguf, tmp_path_factory):
    store = built_store(tmp_path_factory.mktemp("store"))
    draft_model = DraftModel(store, session=True, state=tmp_path_factory.mktemp("state"))
    return llama(gguf, logits_all=True, draft_model=draft_model)


@pytest.fixture(scope="module")
def prompts(plain):
    """Parts of 24 places in recorded texts, from one token to more than a batch reads."""
    ids = [token for text in recorded_texts() for token in plain.tokenize(text.encode(), add_bos=False)]
    return [ids[200 * i :][: (1, 17, 120, 129, 500)[i % 5]] for i in range(24)]


def written(llm, prompt, count, **options):
    text = []
    for token in llm.generate(prompt, **{"temp": 0.0, **options}):
        text.append(token)
        if len(text) == count:
            return text


def test_tokens_are_those_of_the_tokenizer(plain):
    tokenizer = Tokenizer.from_file(str(PACKAGE / "reference" / "tokenizer.json"))
    for text in ODD + [path.read_text(encoding="utf-8") for path in FILES]:
        wanted = tokenizer.encode(text, add_special_tokens=False).ids
        assert plain.tokenize(text.encode(), add_bos=False, special=True) == wanted
    assert plain.token_bos() == plain.token_eos() == tokenizer.token_to_id("<|endoftext|>")


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(PACKAGE / "reference", dtype=torch.float32)


def test_logits_are_those_of_transformers(gguf, reference, prompts):
    llm = llama(gguf, logits_all=True, type_k=0, type_v=0)  # keys and values in float32
    llm.eval(prompts[2])
    with torch.no_grad():
        wanted = reference(torch.tensor([prompts[2]])).logits[0].numpy()
    assert np.abs(llm.scores[: len(prompts[2])] - wanted).max() < 1e-3


def test_greedy_text_is_that_without_drafts(plain, ours, prompts):
    for prompt in prompts:
        count = min(90, CONTEXT - len(prompt))
        assert written(ours, prompt, count) == written(plain, prompt, count)
    counts = ours.draft_model.statistics()
    assert counts["failures"] == 0 and counts["requests"] == len(prompts)
    assert counts["accepted"] > counts["steps"] / 2


def test_completions_and_streams(plain, ours, prompts):
    """Through the calls that people make, which end texts by length, by stop words, and at the end of the context."""
    text = plain.detokenize(prompts[4]).decode(errors="replace")
    for options in ({"max_tokens": 1}, {"max_tokens": 40, "stop": ["return"]}, {"max_tokens": None, "top_k": 1}):
        both = [llm.create_completion(text, temperature=0.0, **options)["choices"] for llm in (plain, ours)]
        assert both[0] == both[1]
    pieces = [piece["choices"][0]["text"] for piece in ours(text, max_tokens=40, temperature=0.0, stream=True)]
    assert "".join(pieces) == plain(text, max_tokens=40, temperature=0.0)["choices"][0]["text"]


def test_sampled_text_is_the_same_under_one_seed(plain, ours, prompts):
    """One number of the sampler's is drawn for each token that is emitted, drafted or not.

    Few tokens are left to choose from: among all, rounding lets some change places, and a number then means another.
    """
    for seed, options in enumerate([{"temp": 0.8}, {"temp": 0.3, "repeat_penalty": 1.2}, {"temp": 0.7, "top_k": 5}]):
        for llm in (plain, ours):
            llm.set_seed(seed)
        assert written(ours, prompts[2], 60, **options) == written(plain, prompts[2], 60, **options)


def test_grammars_and_processors(plain, ours, prompts):
    accepted = ours.draft_model.statistics()["accepted"]
    for _ in range(2):
        texts = []
        for llm in (plain, ours):
            grammar = LlamaGrammar.from_string('root ::= ("abc" | "xyz, ")+', verbose=False)
            texts.append(written(llm, prompts[2], 40, grammar=grammar))
        assert texts[0] == texts[1]
    assert ours.draft_model.statistics()["accepted"] > accepted

    def seen(ids, scores):
        scores = scores.copy()
        scores[ids[-1]] = -np.inf  # never twice the same token in a row
        return scores

    texts = [written(llm, prompts[3], 60, logits_processor=LogitsProcessorList([seen])) for llm in (plain, ours)]
    assert texts[0] == texts[1]


def test_turns_edits_and_two_at_once(gguf, plain, ours, prompts):
    """A text that goes on, is taken back, is asked again, and one of another `Llama` with the same draft model."""
    other = llama(gguf, logits_all=True, draft_model=ours.draft_model)
    text = list(prompts[2])
    for turn in range(4):
        first, second = ours.generate(text, temp=0.0), other.generate(prompts[7], temp=0.0)
        pairs = [(next(first), next(second)) for _ in range(20)]
        assert [one for one, _ in pairs] == written(plain, text, 20)
        assert [two for _, two in pairs] == written(plain, prompts[7], 20)
        text = (text + [one for one, _ in pairs])[: -turn or None] + prompts[turn + 5][:9]
    assert ours.draft_model.statistics()["failures"] == 0


def test_stores_of_other_tokenizers_and_a_llama_without_room(gguf, prompts, tmp_path):
    other = Tokenizer(BPE({chr(33 + i): i for i in range(90)}, []))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("thequickbrownfox" * 20)
    build_datastore(tmp_path / "store", tmp_path / "texts", other)
    with pytest.raises(TokenizerMismatchError, match="stand for another text"):
        written(llama(gguf, logits_all=True, draft_model=DraftModel(tmp_path / "store")), prompts[1], 5)
    with pytest.raises(ConfigError, match="Pass logits_all=True"):
        written(llama(gguf, draft_model=DraftModel()), prompts[1], 5)
