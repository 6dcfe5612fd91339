"""Every published rule on examples small enough to work out by hand, and kernels of some against plain twins."""

from array import array
from collections import Counter

import naive_published as naive
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tree_paths import leaf_paths, paths_of

from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.published.logits import TEMPLATE, LogitSpec, Lookahead, TokenRecycling
from retrieve_spec.drafting.published.search import Stand, best_tree
from retrieve_spec.drafting.published.stores import Hierarchy, Rest, Sam, SamRecycling, earliest_end, frequent_grams
from retrieve_spec.drafting.published.text import AdaptiveNgram, AdaptiveTrigram, PromptLookup, SuffixDecoding
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.sources import SOURCE_NAMES
from retrieve_spec.sources.session import SessionMemory

BIG = Budget(256, 256)


def ids(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], np.int32)


def paths(tree: DraftTree) -> list[str]:
    """Texts from the root to every leaf, in the order of the tree."""
    return ["".join(map(chr, path)) for path in leaf_paths(tree)]


def draft(drafter, prompt: str, budget: Budget = BIG) -> DraftTree:
    drafter.start(ids(prompt))
    return drafter.propose(budget)


def sources(tree: DraftTree) -> set[str]:
    return {SOURCE_NAMES[s] for s in tree.source}


def seen(drafter, emitted: str, tree: DraftTree | None = None, path=(), top: list[str] | None = None) -> None:
    """Tell a drafter of a pass; `top` are the target's top tokens per row."""
    tree = tree if tree is not None else DraftTree()
    top_ids = top_logits = None
    if top is not None:
        top_ids = np.array([[ord(c) for c in row] for row in top], np.int32)
        top_logits = np.tile(-np.arange(top_ids.shape[1], dtype=np.float32), (len(top), 1))
    drafter.observe(VerifiedPass(tree, np.array(path, np.int32), ids(emitted), top_ids, top_logits))


# --- rules of the text so far


def test_prompt_lookup_takes_the_earliest_match_of_the_longest_ngram():
    assert paths(draft(PromptLookup(), "abcDEFGHIJKLMabcXabc")) == ["DEFGHIJKLM"]


def test_prompt_lookup_wants_all_ten_tokens_else_a_shorter_ngram():
    # "abc" goes on with 6 tokens only; "c" came up earlier, with 10 to follow.
    assert paths(draft(PromptLookup(), "cPQRSTUVabcXYZabc")) == ["PQRSTUVabc"]
    assert paths(draft(PromptLookup(), "abcXYZabc")) == []


def test_anpd_takes_the_highest_order_then_the_most_frequent():
    # After "bcde" only "X"; "e" alone is followed by "Y" twice.
    assert paths(draft(AdaptiveNgram(), "bcdeXeYeYbcde"))[0].startswith("X")
    # "a" is followed by b twice, by c once; then "ab" by "1" and by "2", once each: the later of the two.
    assert paths(draft(AdaptiveNgram(), "ab1ac.ab2#a"))[0][:2] == "b2"
    assert len(draft(AdaptiveNgram(), "abababab")) == AdaptiveNgram.length


def test_sam_copies_four_tokens_per_matched_one_from_the_earliest_place():
    assert paths(draft(Sam(), "zaPQRSTUVWaXYZ.a")) == ["PQRS"]  # match of 1
    assert paths(draft(Sam(), "zabPQRSTUVWabXYZ.ab")) == ["PQRSTUVW"]  # match of 2
    assert paths(draft(Sam(), "abc")) == []
    tree = draft(Sam(), "x" * 40)
    assert len(tree) == 1 and tree.is_chain  # the earliest "x"*39 has one token behind it


def test_suffix_takes_earlier_answers_when_they_score_higher():
    session = SessionMemory(exact=True)
    drafter = SuffixDecoding(session=session)
    drafter.start(ids("#"))
    for text in ("abcdef", "abcdef"):
        seen(drafter, text)
        drafter.finish()
        drafter.start(ids("-ab"))
    tree = drafter.propose(BIG)
    assert paths(tree) == ["cdef"] and sources(tree) == {"session"}
    fresh = SuffixDecoding()
    assert len(draft(fresh, "-ab")) == 0


# --- rules of stores


@pytest.fixture(scope="module")
def text_store(make_store):
    """Builds a store of texts, one token per character."""
    return lambda texts: make_store([[ord(c) for c in text] for text in texts])


@pytest.fixture
def store(text_store):
    return text_store(["abcdX", "1abcdX", "abceY", "1abce"])


def test_rest_drafts_the_most_frequent_prefixes_of_the_longest_match(store):
    # "abc" occurs four times: d 2 (then X 2), e 2 (then Y 1); no draft crosses the end of a document.
    tree = draft(Rest([store]), "..abc", Budget(3, 10))
    assert paths(tree) == ["dX", "e"]
    assert np.exp(tree.log_p) == pytest.approx([2 / 5] * 3)
    assert paths(draft(Rest([store]), "..abc")) == ["dX", "eY"]
    assert sources(tree) == {"exact"}


def test_rest_wants_two_tokens(store):
    assert len(draft(Rest([store]), "..a")) == 0


def test_sam_takes_the_store_when_its_match_is_longer_by_more_than_five(text_store):
    store = text_store(["abcdefghKLMNOPQRSTUVWXYZ"])
    assert paths(draft(Sam([store]), "..abcdefgh")) == ["KLMNOPQRSTUV"]  # 8 matched, 3 counted, 12 nodes
    assert len(draft(Sam([store]), "..efgh")) == 0  # 4 matched, none counted


def test_sam_recycling_is_either_or(text_store):
    drafter = SamRecycling()
    assert paths(draft(drafter, "zabcdePQRS.abcde")) == ["PQRS.abcde"]  # a match of 5: a chain
    drafter.start(ids("zabcdPQ.abcd"))
    assert len(drafter.propose(BIG)) == 0  # a match of 4: nothing recycled yet
    seen(drafter, "d", top=["12345678"])
    assert paths(drafter.propose(BIG)) == list("12345678")
    store = text_store(["0123456789abcKLMNO"])
    tree = draft(SamRecycling([store]), "..0123456789abc")
    assert paths(tree) == ["KLMNO"] and sources(tree) == {"exact"}


def test_hierarchy_goes_from_the_context_to_answers_to_statistics(text_store):
    answers, corpus = text_store(["aBBBBz", "1aBBBBz", "aCCCCz"]), text_store(["xaDDDDz", "xaEE"])
    tree = draft(Hierarchy([answers, corpus]), "a1234.a5678.xa")
    assert sorted(paths(tree)) == ["1234", "5678", "BBBB", "CCCC", "DDDD", "EE"]
    assert sources(tree) == {"context", "exact"}


def test_frequent_grams_are_the_most_frequent_of_the_prefixes_looked_at():
    texts = ["ab", "ab", "ac", "de"]

    def follow(prefix):
        counts = Counter(t[len(prefix)] for t in texts if t.startswith(prefix) and len(t) > len(prefix))
        return [(ord(c), n, prefix + c) for c, n in counts.items()]

    found = [("".join(map(chr, gram)), n) for gram, n in frequent_grams(follow, "", 2)]
    assert found == [("ab", 2), ("ac", 1), ("de", 1)]
    texts = [f"{a}{b}" for a in "abcdefgh" for b in "123456789"]
    found = [("".join(map(chr, gram)), n) for gram, n in frequent_grams(follow, "", 2)]
    assert len(found) == 57  # eight first tokens, 56 second ones; none of them prolongs "h"
    assert found[0] == ("a1", 1) and found[-1] == ("h", 9)


def test_hierarchy_stops_at_seven_guesses_newest_first(text_store):
    context = "".join(f"a{c * 4}." for c in "123456789")
    tree = draft(Hierarchy([text_store(["aZZZZ"])]), context + "a")
    assert sorted(paths(tree)) == [c * 4 for c in "3456789"]


def test_adaptive_trigram_mixes_the_corpus_with_the_text(text_store):
    drafter = AdaptiveTrigram([text_store(["abX.", "1abX.", "abY."])])
    tree = draft(drafter, "ab", Budget(2, 1))
    assert [chr(t) for t in tree.token_ids] == ["X", "Y"] and sources(tree) == {"ngram"}
    assert np.exp(tree.log_p) == pytest.approx([2 / 3, 1 / 3])
    # Four observations stand for the corpus; two "abZ" in the text make Z the 1/3 that Y and X share less of.
    tree = draft(drafter, "abZabZab", Budget(3, 1))
    assert dict(zip(map(chr, tree.token_ids), np.exp(tree.log_p), strict=True)) == pytest.approx(
        {"X": 4 / 9, "Z": 1 / 3, "Y": 2 / 9}
    )


def test_adaptive_trigram_learns_what_was_rejected():
    drafter = AdaptiveTrigram()
    tree = draft(drafter, "abXabYab", Budget(1, 1))
    assert paths(tree) == ["X"]
    seen(drafter, "~ab", tree)  # X was drafted and wrong
    assert paths(drafter.propose(Budget(1, 1))) == ["Y"]


# --- rules of the target's top tokens


def test_token_recycling_has_the_published_tree():
    assert len(TEMPLATE) == 80
    depths: list[int] = []
    for parent, _, _ in TEMPLATE:
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    levels = Counter(depths)
    assert [levels[d] for d in range(1, 7)] == [8, 21, 25, 15, 8, 3]


def test_token_recycling_fills_the_tree_rank_by_rank():
    drafter = TokenRecycling()
    assert len(draft(drafter, "xa")) == 0
    tree = DraftTree.from_paths([[ord("b")], [ord("c")]])
    seen(drafter, "a", tree, top=["bcdefghi", "zyxwvuts", "12345678"])  # after a, b and the rejected c
    found = paths(drafter.propose(BIG))
    # All eight ranks of a and of b (rank 0), four of c (rank 1); the others are unknown.
    assert found == [*(f"b{x}" for x in "zyxwvuts"), *(f"c{x}" for x in "1234"), *"defghi"]
    seen(drafter, "a", top=["ijklmnop"])
    assert paths(drafter.propose(BIG)) == list("ijklmnop")  # overwritten, not averaged
    assert len(draft(drafter, "xa")) == 0  # a new request starts empty


def test_token_recycling_keeps_its_matrix_in_a_session():
    drafter = TokenRecycling(session=SessionMemory())
    draft(drafter, "xa")
    seen(drafter, "a", top=["ijklmnop"])
    assert paths(draft(drafter, "xa")) == list("ijklmnop")


def test_logitspec_continues_the_text_and_the_runners_up():
    drafter = LogitSpec()
    text = "aPQRS." + "k12345." + "a"
    drafter.start(ids(text[:-1]))
    drafter.observe_prompt(ids("."), np.array([[ord(c) for c in "akz"]], np.int32), np.zeros((1, 3), np.float32))
    seen(drafter, "a")
    # The chosen "a" is skipped; "k" goes on for three tokens, "z" is unknown.
    assert paths(drafter.propose(BIG)) == ["PQRS.k12345.a", "k123", "z"]


def test_logitspec_shortens_by_rank():
    drafter = LogitSpec()
    drafter.start(ids("".join(f"{chr(c)}abcd" for c in range(200, 240)) + "#"))
    ranked = np.arange(200, 240, dtype=np.int32)[None]
    drafter.observe_prompt(ids("#"), ranked, np.zeros((1, 40), np.float32))
    lengths = {p[0]: len(p) for p in paths(drafter.propose(Budget(256, 20)))}
    assert [lengths[chr(200 + r)] for r in (0, 8, 9, 10)] == [4, 4, 3, 3]
    assert sum(lengths.values()) == LogitSpec.nodes


def test_lookahead_fills_its_window_in_three_passes_and_then_guesses():
    drafter = Lookahead()
    tree = draft(drafter, "a")  # the window starts from tokens of the prompt: all "a"
    sizes = []
    for _ in range(5):
        sizes.append(len(tree))
        top = [chr(ord("a") + int(d) + 1) for d in [0, *tree.depth]]  # the target counts: b, c, d, … by depth
        seen(drafter, "a", tree, top=top)
        tree = drafter.propose(BIG)
    assert sizes[0] == 9
    assert drafter._pool[ord("a")]  # every n-gram in the pool is a token and the four that followed it
    assert all(len(gram) == 4 for grams in drafter._pool.values() for gram in grams)
    newest = "".join(map(chr, list(drafter._pool[ord("a")])[-1]))
    assert any(p.startswith(newest) for p in paths(tree))


def test_lookahead_leaves_the_window_out_of_a_small_budget():
    drafter = Lookahead()
    assert len(draft(drafter, "abc", Budget(8, 20))) == 0
    assert len(draft(drafter, "abc", Budget(60, 8))) == 0
    assert len(draft(drafter, "abc", Budget(60, 9))) > 0


def test_stand_averages_probabilities_and_backs_off():
    drafter = Stand()
    drafter._noise = [0.0] * len(drafter._noise)
    draft(drafter, "xa")
    seen(drafter, "b", top=["bc"])  # after "xa": b 0.73, c 0.27
    seen(drafter, "xa", top=["xy"])
    tree = drafter.propose(Budget(2, 1))
    assert [chr(t) for t in tree.token_ids] == ["b", "c"]
    assert np.exp(tree.log_p) == pytest.approx([0.731, 0.269], abs=1e-3)
    seen(drafter, "ca", top=["cb"])  # now b and c are even after "xa"; the text ends in "ca", known as "a"
    assert np.exp(drafter.propose(Budget(2, 1)).log_p) == pytest.approx([0.5, 0.5], abs=1e-3)


def test_stand_draws_without_replacement_and_the_same_in_every_request():
    drafter = Stand()
    drawn = []
    for _ in range(2):
        draft(drafter, "xa")
        seen(drafter, "a", top=["bcdefghijk"])
        drawn.append([int(t) for t in drafter.propose(Budget(10, 1)).token_ids])
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == len(drawn[0])


def test_stand_keeps_the_places_that_were_right_most_often():
    first = best_tree(Counter(), 0, 80, 20)
    assert len(first) == 80 and first[0] == (0,)
    hits = Counter({(1,): 900, (1, 1): 800, (1, 1, 1): 700, (0,): 10})
    assert best_tree(hits, 1000, 3, 20) == [(1,), (1, 1), (1, 1, 1)]
    assert max(len(path) for path in best_tree(hits, 1000, 80, 2)) == 2


texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@settings(deadline=None)
@given(texts, st.integers(1, 6))
def test_earliest_end_is_the_first_match(text, length):
    length = min(length, len(text))
    assert earliest_end(array("i", text), length) == naive.earliest_end(text, length)


@settings(deadline=None)
@example([1, 0, 2, 0, 2, 1, 0, 2, 1, 0], 5, 3, False)  # two match lengths have the same score but for its rounding
@given(texts, st.integers(1, 12), st.integers(1, 6), st.booleans())
def test_suffix_tree_is_the_naive_one(text, nodes, depth, whole):
    """Nodes too where nothing is cut; else the best score, as equally probable nodes may be cut or not."""
    drafter = SuffixDecoding()
    if whole:
        drafter.factor, drafter.min_token_probability, nodes, depth = 1000.0, 0.01, 256, 4
    drafter.start(np.array(text, np.int32))
    tree = drafter.propose(Budget(nodes, depth))
    best = naive.speculate(text, drafter.factor, nodes, depth, 64, drafter.min_token_probability)
    p = np.sort(np.exp(tree.log_p))
    assert any(len(p) == len(each) and p == pytest.approx(sorted(q for _, q in each), abs=1e-6) for each in best)
    if whole:
        found = dict(zip(map(tuple, paths_of(tree)), np.exp(tree.log_p).tolist(), strict=True))
        assert any(found.keys() == dict(each).keys() for each in best)
