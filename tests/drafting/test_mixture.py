import numba
import numpy as np
import pytest

from retrieve_spec.config import MAX_NODES, SpeculationConfig
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.kernels.sampling import gumbel_argmax, noise_key, uniform
from retrieve_spec.sources import SOURCE_NAMES
from retrieve_spec.sources.session import SessionMemory

RANDOM = np.random.default_rng(11)
long_run = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="takes minutes without the compiler")


def markov(seed, length, alphabet=40, order=2, peaked=0.75):
    """A text in which the last `order` tokens mostly, but not always, decide the next one."""
    rng = np.random.default_rng(seed)
    choices = {}
    text = list(rng.integers(0, alphabet, order))
    while len(text) < length:
        key = tuple(text[-order:])
        if key not in choices:
            choices[key] = rng.integers(0, alphabet, 3)
        pick = choices[key][rng.choice(3, p=[peaked, 0.9 * (1 - peaked), 0.1 * (1 - peaked)])]
        text.append(int(pick if rng.random() < 0.97 else rng.integers(0, alphabet)))
    return np.array(text, np.int32)


def test_limits_of_the_config():
    text = markov(0, 600)
    drafter = MixtureDrafter(SpeculationConfig(max_depth=3, min_path_probability=0.03))
    drafter.start(text)
    tree = drafter.propose(Budget(200, 100))
    assert 0 < tree.depth.max() <= 3
    assert np.exp(tree.log_p).min() >= 0.0299
    assert len(drafter.propose(Budget(10**6, 10))) <= MAX_NODES


@long_run
@pytest.mark.parametrize("cost", [None, np.linspace(1.0, 1.5, 33).astype(np.float32)])
def test_expected_is_what_comes(run, cost):
    """Within 5 % over a long run, from the first token on."""
    text = markov(5, 6000)
    drafter = MixtureDrafter(recycling=False)
    r = run(drafter, lambda left: Budget(32, left, cost)).request(text[:500], text[500:])
    expected = 1 + np.mean([tree.expected_accepted for tree in r.trees])
    assert 1 + np.mean(r.accepted) > 1.5
    assert expected == pytest.approx(1 + np.mean(r.accepted), rel=0.05)


def secret_tokens(trees, secret):
    return {int(t) for tree in trees for t in tree.token_ids} & set(secret)


@pytest.mark.parametrize("kind", ["plain", "recycling", "prediction", "aborted", "resting"])
def test_a_request_does_not_see_another(run, kind):
    secret = list(range(500, 560))
    prompt = [1, 2, 3, 4]
    drafter = MixtureDrafter()

    def leaky_top(tree, written):
        ids = np.tile(np.array(secret[:8], np.int32), (len(tree) + 1, 1))
        return ids, np.zeros((len(tree) + 1, 8), np.float32)

    first = run(drafter, top=leaky_top if kind == "recycling" else None)
    if kind == "resting":
        first.budget = lambda left: Budget(32, left, np.linspace(1, 900, 33).astype(np.float32))
    drafter.start(np.array(prompt * 3, np.int32), np.array(secret, np.int32) if kind == "prediction" else None)
    if kind == "recycling":
        ids = np.tile(np.array(secret[:8], np.int32), (4, 1))
        drafter.observe_prompt(np.array(prompt, np.int32), ids, np.zeros((4, 8), np.float32))
    first.generate(prompt + secret + prompt + secret)
    if kind != "resting":
        assert secret_tokens(first.trees, secret), "the first request drafts them"
    if kind != "aborted":
        drafter.finish()
    second = run(drafter).request(prompt * 3, prompt * 20)
    assert not secret_tokens(second.trees, secret)


def test_a_session_remembers_what_was_generated(run):
    answer = list(range(500, 560))
    session = SessionMemory(10_000)
    drafter = MixtureDrafter(session=session)
    run(drafter).request([1, 2, 3, 700, 701], answer)
    second = run(drafter).request([9, 8, 7], answer)
    assert np.sum(second.accepted) > 40
    names = {SOURCE_NAMES[s] for tree in second.trees for s in tree.source}
    assert "session" in names
    third = run(drafter).request([1, 2, 3], [700, 6, 700, 6])
    assert not secret_tokens(third.trees[:1], [700, 701]), "prompts are not remembered"


def test_fed_text_is_context(run):
    drafter = MixtureDrafter()
    r = run(drafter)
    drafter.start(np.array([1, 2, 3], np.int32))
    r.generate([4, 5, 6])
    drafter.feed(np.arange(100, 200, dtype=np.int32))
    drafter.feed(np.array([7], np.int32))
    drafter.feed(np.array([100, 101], np.int32))
    before = len(r.trees)
    r.generate(range(102, 150))
    assert np.sum(r.accepted[before:]) > 35


def test_a_prediction_is_followed(run):
    expected = RANDOM.integers(100, 4000, 300).astype(np.int32)
    output = np.concatenate([expected[:100], [7, 8], expected[100:200], expected[220:]])
    drafter = MixtureDrafter()
    with_it = run(drafter).request([1, 2], output, expected)
    assert len(with_it.trees) < 60
    assert SOURCE_NAMES.index("prediction") in {int(s) for tree in with_it.trees for s in tree.source}
    assert len(run(drafter).request([1, 2], output).trees) > 200, "forgotten with its request"


def test_recycling_learns_from_rejected_branches(run):
    """The target's top tokens at nodes that were not accepted are drafted when their context comes."""
    drafter = MixtureDrafter()
    drafter.start(np.array([1, 2, 1], np.int32))
    tree = drafter.propose(Budget(4, 2))
    assert tree.token_ids[0] == 2
    top = np.full((len(tree) + 1, 8), 77, np.int32) + np.arange(8, dtype=np.int32)
    logits = np.tile(np.linspace(5, 0, 8, dtype=np.float32), (len(tree) + 1, 1))
    drafter.observe(VerifiedPass(tree, np.empty(0, np.int32), np.array([9], np.int32), top, logits))
    drafter.observe(VerifiedPass(DraftTree(), np.empty(0, np.int32), np.array([1, 2], np.int32)))
    drafted = drafter.propose(Budget(8, 1))
    assert 77 in drafted.token_ids.tolist()
    node = drafted.token_ids.tolist().index(77)
    assert SOURCE_NAMES[drafted.source[node]] == "recycling"


def test_calibration_does_not_see_the_answer(run):
    """What the model said in a pass must not be in the table whose worth that pass is held against."""
    text = np.random.default_rng(8).integers(0, 60, 1500).astype(np.int32)

    def sure(tree, written):
        """Top tokens as they are known after the pass: along the text, the token that came."""
        ids = np.arange(8, dtype=np.int32) + 100 + np.zeros((len(tree) + 1, 1), np.int32)
        ids[0, 0] = written[-1]
        return ids, np.tile(np.array([9, *[0] * 7], np.float32), (len(tree) + 1, 1))

    drafter = MixtureDrafter()
    run(drafter, lambda left: Budget(1, 1), sure).request(text[:2], text[2:])
    hits, _ = drafter.calibration.statistics()["recycling"]
    assert hits < 0.1 * len(text), "the next token is random: nothing that was recycled can know it"


def test_prompt_logits_teach_recycling():
    drafter = MixtureDrafter()
    prompt = np.array([5, 6, 7], np.int32)
    drafter.start(prompt)
    ids = np.array([[10 * (i + 1) + j for j in range(8)] for i in range(3)], np.int32)
    drafter.observe_prompt(prompt, ids, np.tile(np.linspace(4, 0, 8, dtype=np.float32), (3, 1)))
    assert drafter.propose(Budget(1, 1)).token_ids.tolist() == [30]


@pytest.mark.parametrize(("prompt", "known"), [([0, 6], True), ([6], False)])
def test_after_a_new_token_comes_what_followed_others_in_its_place(prompt, known):
    """A text's first token is in no place after another, although arrays are 0 before it."""
    drafter = MixtureDrafter()
    drafter.start(np.array(prompt, np.int32))
    ids = np.tile(np.arange(30, 38, dtype=np.int32), (len(prompt), 1))
    drafter.observe_prompt(
        np.array(prompt, np.int32), ids, np.linspace(4, 0, ids.size, dtype=np.float32).reshape(ids.shape)
    )
    drafter.observe(VerifiedPass(DraftTree(), np.empty(0, np.int32), np.array([0, 9], np.int32)))
    assert (30 in drafter.propose(Budget(8, 1)).token_ids) == known


def test_empty_beginnings():
    drafter = MixtureDrafter(session=SessionMemory(100))
    drafter.start(np.empty(0, np.int32))
    assert len(drafter.propose(Budget(8, 8))) == 0
    drafter.observe(VerifiedPass(DraftTree(), np.empty(0, np.int32), np.array([3], np.int32)))
    drafter.observe(VerifiedPass(DraftTree(), np.empty(0, np.int32), np.empty(0, np.int32)))
    drafter.finish()
    drafter.finish()
    assert len(drafter.session) == 1


def sampled(seed, length, alphabet=12):
    """(text, noise key) of a first-order source whose tokens are drawn as the decoding loop draws them."""
    rng = np.random.default_rng(seed)
    table = np.log(rng.dirichlet(np.full(alphabet, 0.3), alphabet))
    ids, text = np.arange(alphabet, dtype=np.int32), [0]
    while len(text) < length:
        text.append(int(gumbel_argmax(ids, table[text[-1]], alphabet, seed, 0, len(text))))
    return np.array(text, np.int32)


def noisy(drafter, run, text, known, start=300, seed=9, unseen=0, nodes=8):
    """Mean accepted and expected tokens; the drafter does not see the first `unseen` tokens of the text."""
    r = run(drafter)
    r.budget = lambda left: Budget(nodes, left, None, (seed, 0, len(text) - left) if known else None)
    r.request(text[unseen:start], text[start:])
    return np.mean(r.accepted), np.mean([tree.expected_accepted for tree in r.trees])


@long_run
def test_known_noise_tells_which_token_will_be_drawn(run):
    text = sampled(9, 5000)
    plain, _ = noisy(MixtureDrafter(recycling=False), run, text, False)
    known, _ = noisy(MixtureDrafter(recycling=False), run, text, True)
    assert known > 1.3 * plain
    wrong, _ = noisy(MixtureDrafter(recycling=False), run, text, True, seed=10)
    assert wrong < known, "the noise of another seed is no help"


@long_run
def test_noise_does_little_harm_where_the_target_is_sure_of_tokens_that_the_drafter_is_not(run):
    text = sampled(9, 5000)
    unknown, _ = noisy(MixtureDrafter(recycling=False), run, text, False, nodes=1)
    coupled, _ = noisy(MixtureDrafter(recycling=False), run, text, True, seed=10, nodes=1)
    assert coupled > 0.65 * unknown


@pytest.mark.parametrize("seed", [0, -1, 2**62, 2**63 + 5, 2**64 - 1])
def test_any_seed_is_heard(seed):
    def waits(token, at):
        return -np.log(uniform(np.uint64(noise_key(np.uint64(seed % 2**64), 0, at)), token))

    apart = max(range(5, 50), key=lambda at: abs(np.log(waits(2, at) / waits(3, at))))
    drafter = MixtureDrafter()
    drafter.start(np.array([1, 2, 1, 3, 1], np.int32))
    tree = drafter.propose(Budget(8, 8, None, (seed, 0, apart)))
    tree.validate()
    first = [t for t in tree.token_ids[tree.depth == 1].tolist() if t in (2, 3)]
    luckier = min((2, 3), key=lambda token: waits(token, apart))
    assert first[0] == luckier, "2 and 3 are about as probable, so the noise decides"
