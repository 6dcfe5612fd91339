import os

import numpy as np
from known_phrases import known

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.drafters import Drafters, DraftOptions
from retrieve_spec.sources.phrases import PhraseMemory

RARE = [501, 502, 503, 504]


def answer(seed, *said):
    """Text of its own tokens, with a run in the middle."""
    own = np.arange(1000 * seed, 1000 * seed + 40)
    return [*own[:20].tolist(), *said, *own[20:].tolist()]


def drafted_after(drafter, *prompt):
    """Tokens drafted anywhere after a prompt."""
    drafter.start(np.array(prompt, np.int32))
    return set(drafter.propose(Budget(60, 30)).token_ids.tolist())


def test_what_one_request_was_given_is_never_drafted_into_another(run):
    """Another user cannot get the rest of a rare text by beginning it."""
    drafter = MixtureDrafter(recycling=False)
    run(drafter).request([7], answer(1, *RARE, *RARE, *RARE))
    for i in range(1, len(RARE)):
        assert not drafted_after(drafter, 9, *RARE[:i]) & set(RARE[i:])
    run(drafter).request([8], answer(2, *RARE))
    assert RARE[1] in drafted_after(drafter, 9, RARE[0]), "two requests were given it"


def test_what_one_key_alone_was_given_is_not_drafted(run):
    drafter = MixtureDrafter(recycling=False)
    for seed in range(1, 4):
        drafter.requester_id = "alice"
        run(drafter).request([7], answer(seed, *RARE))
    assert not drafted_after(drafter, 9, RARE[0]) & set(RARE[1:])
    drafter.finish()
    drafter.requester_id = "bob"
    run(drafter).request([7], answer(5, *RARE[:2]))
    assert RARE[1] in drafted_after(drafter, 9, RARE[0])
    assert RARE[2] not in drafted_after(drafter, 9, RARE[0], RARE[1]), "bob was given two tokens of it"


def test_rows_of_one_call_are_one_request(run):
    drafters = Drafters(SpeculationConfig(), [], None, "m")

    def together(call, *texts):
        rows = [drafters.open(DraftOptions(call=call)) for _ in texts]
        for drafter, text in zip(rows, texts, strict=True):
            run(drafter).request([7], text)
            drafters.close(drafter)
        return rows[0]

    first = together("one", *(answer(1 + i, *RARE) for i in range(3)))
    assert not drafted_after(first, 9, RARE[0]) & set(RARE[1:])
    first.finish()
    first = together("other", *(answer(6 + i, *RARE) for i in range(2)))
    assert RARE[1] in drafted_after(first, 9, RARE[0]), "another call was given it too"


def test_text_between_answers_is_no_phrase(run):
    drafter = MixtureDrafter(recycling=False)
    for seed in (1, 2):
        r = run(drafter)
        drafter.start(np.array([7], np.int32))
        r.generate(answer(seed, 601))
        drafter.feed(np.array([602, 603], np.int32))
        r.generate([604, 605, 9000 + seed])
        drafter.finish()
    phrases = drafter.calibration.phrases
    assert known(phrases, [604]) == {605: 1.0}
    assert known(phrases, [602]) == {} and known(phrases, [603]) == {}, "it was not generated"
    assert known(phrases, [601]) == {}, "no phrase reaches over it"


def test_phrases_are_kept_beside_the_calibration(tmp_path, run):
    path = tmp_path / "m.npy"
    drafter = MixtureDrafter(calibration=Calibration(path), recycling=False)
    for seed in range(1, 18):
        run(drafter).request([7], answer(seed, *RARE))
    assert sorted(os.listdir(tmp_path)) == ["m.npy", "m.phrases.npy"]
    later = MixtureDrafter(calibration=Calibration(path), recycling=False)
    assert later.calibration.cells.any() and later.calibration.scale.any(), "it starts warm"
    assert RARE[1] in drafted_after(later, 9, RARE[0])


def test_what_one_request_was_given_is_not_readable_in_the_file(tmp_path, run):
    path = tmp_path / "m.npy"
    run(MixtureDrafter(calibration=Calibration(path), recycling=False)).request([7], answer(1, *RARE, *RARE))
    memory = PhraseMemory()
    memory.learn(np.empty(0, np.int32))
    kept = np.load(tmp_path / "m.phrases.npy")
    assert np.array_equal(kept, memory.packed()), "not even fingerprints, which can be found by trying"


def test_forgetting_empties_phrases_everywhere(make_store):
    store = make_store([list(range(100, 160))])
    path = store.calibration_path("m")
    beside = path.with_name("m.phrases.npy")
    calibration = Calibration(path)
    for seed in range(1, 4):
        calibration.phrases.learn(np.array(answer(seed, *RARE), np.int32))
    calibration.keep()
    assert beside.exists()
    drafters = Drafters(SpeculationConfig(), [store], None, "m")
    held = drafters.get()
    assert RARE[1] in drafted_after(held, 9, RARE[0])
    held.finish()
    drafters.forget()
    assert not beside.exists()
    assert known(held.calibration.phrases, [RARE[0]]) == {}, "also for whoever holds the drafter"
    assert not Calibration(path).phrases.sets.any()


def test_of_what_is_under_way_while_its_scope_is_forgotten_no_phrase_is_learned():
    drafters = Drafters(SpeculationConfig(), [], None, "m")
    lent = {scope: drafters.open(DraftOptions(scope=scope)) for scope in ("alice", "bob")}
    for drafter in lent.values():
        drafter.start(np.arange(5, dtype=np.int32))
        drafter.observe(VerifiedPass(DraftTree(), np.empty(0, np.int32), np.array(answer(1, *RARE), np.int32)))
    drafters.forget("alice")
    for scope, requests in (("alice", 0), ("bob", 1)):
        drafter = lent[scope]
        drafter.finish()
        assert drafter.calibration.phrases.requests == requests
        drafters.close(drafter)
    drafter = lent["alice"]
    drafter.start(np.arange(5, dtype=np.int32))
    drafter.observe(VerifiedPass(DraftTree(), np.empty(0, np.int32), np.array(answer(1, *RARE), np.int32)))
    drafter.finish()
    assert drafter.calibration.phrases.requests == 2, "the next request is learned from"
