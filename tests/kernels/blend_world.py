"""The same sources twice: as rows of the kernels' table and as naive ones."""

import itertools
from dataclasses import dataclass
from typing import Any

import naive_blend as naive
import numpy as np
from doors import alignment, expand, learn, request, unigram
from naive_alignments import NaiveAlignments
from naive_automaton import BOUNDARY, NaiveText
from naive_phrases import NaivePhrases
from naive_recycling import NaiveTable
from naive_unigrams import AGES, COUNTS, NaiveUnigrams

from retrieve_spec.config import MAX_NODES
from retrieve_spec.kernels import automaton as automaton_kernels
from retrieve_spec.kernels import blend, calibration, source_table
from retrieve_spec.kernels import request as request_kernels
from retrieve_spec.kernels.recycling import MOST
from retrieve_spec.kernels.unigram import RATES
from retrieve_spec.sources.automaton import SuffixAutomaton
from retrieve_spec.sources.distilled import DistilledTable
from retrieve_spec.sources.phrases import PhraseMemory
from retrieve_spec.sources.recycling import Bigrams, RecyclingTable
from retrieve_spec.sources.rows import Alignments, Prediction, SourceTable, address_of, store_rows
from retrieve_spec.sources.session import loop_start
from retrieve_spec.sources.unigrams import Unigrams

NO_NOISE = (0, 0, 0, 0)


def request_of(**fields):
    """A request record with these fields; of an array it holds the address. Hold both."""
    record = np.zeros(1, request_kernels.REQUEST)
    for name, value in fields.items():
        record[name] = address_of(value) if isinstance(value, np.ndarray) else value
    return record


@dataclass
class World:
    text: list[int]
    sources: list[Any]
    table: np.ndarray
    cursors: np.ndarray
    tail: np.ndarray
    alive: list[Any]

    def request(self, cells, scale, trust, min_p, noise, **more):
        """(record, the arrays it points to): where the text stands"""
        rows = len(self.table)
        arrays = {
            "table": self.table,
            "cursors": self.cursors.copy(),
            "newest": self.tail.copy(),
            "cells": cells,
            "scale": scale,
            "trust": trust,
            "scratch": blend.scratch_memory(rows),
            **more,
        }
        sampled, seed, row, position = noise
        numbers = {"num_sources": rows, "length": len(self.text), "min_p": min_p}
        numbers |= {"sampled": sampled, "seed": seed, "row": row, "position": position}
        return request_of(**arrays, **numbers), arrays

    def grow(self, cells, scale, max_nodes, max_depth, min_p=0.0, cost=(), noise=NO_NOISE, trust=None):
        """(nodes as the naive twin gives them, nodes worth verifying, the kernel's cursors)."""
        rows, pool = len(self.table), 64 * MAX_NODES
        record, arrays = self.request(
            cells,
            scale,
            (trust or naive.Trust()).table(),
            min_p,
            noise,
            node_cursors=np.zeros(((MAX_NODES + 1) * rows, source_table.CURSOR), np.int64),
            node_tails=np.zeros((MAX_NODES + 1, source_table.TAIL), np.int32),
            nodes=np.empty((MAX_NODES, 4), np.int64),
            node_p=np.empty(MAX_NODES, np.float32),
            pool_p=np.empty(pool, np.float32),
            pool_ids=np.empty((pool, 3), np.int32),
            heap=np.empty(pool, np.int32),
        )
        record["pool_size"] = pool
        best, n = expand.expand(
            named(record), np.asarray(cost, np.float32), max_nodes, max_depth, 1.0, 0, self.stores()
        )
        nodes, node_p = arrays["nodes"], arrays["node_p"]
        grown = [(*node, float(p)) for node, p in zip(nodes[:n].tolist(), node_p[:n], strict=True)]
        return grown, int(best), arrays["node_cursors"]

    def stores(self):
        """What kernels are told: None where no source is a store's."""
        kinds = set(self.table["kind"].tolist())
        return 1 if kinds & {source_table.KIND_NGRAM, source_table.KIND_EXACT, source_table.KIND_DENSE} else None

    def learn(self, cells, scale, use, emitted, min_p=0.0, noise=NO_NOISE, every=1):
        """(the tail behind the tokens, the request's factors)"""
        record, arrays = self.request(cells, scale, naive.Trust().table(), min_p, noise, use=use)
        learn.learn(named(record), np.array(emitted, np.int32), every, self.stores())
        return arrays["newest"], arrays["trust"]


def named(record):
    """The first of an array of records, with fields that can be read as attributes."""
    return named_all(record)[0]


def newest_first(text):
    tail = np.zeros((1, source_table.TAIL), np.int32)
    newest = text[::-1][: source_table.TAIL]
    tail[0, : len(newest)] = newest
    return tail


def make_world(rng, alphabet, stores=(), documents=()):
    """Random text, session, expected text and logits over a tiny alphabet, and stores made of `documents`."""
    text = rng.integers(0, alphabet, int(rng.integers(1, 28))).tolist()
    session_text = [*rng.integers(0, alphabet, 14).tolist(), BOUNDARY, *rng.integers(0, alphabet, 14).tolist()]
    expected = rng.integers(0, alphabet, 12).tolist()
    context, session = SuffixAutomaton(16, shortest=1), SuffixAutomaton(16)
    naive_context, naive_session = NaiveText(exact=False), NaiveText(exact=False)
    for automaton, twin, tokens in ((context, naive_context, text), (session, naive_session, session_text)):
        automaton.extend(np.array(tokens, np.int32))
        twin.extend(tokens)
    recycling, naive_table = RecyclingTable(1 << 8, 4), NaiveTable(4)
    for _ in range(12):
        newest = rng.integers(0, alphabet, 3)
        ids = rng.choice(alphabet + 3, 4, replace=False)
        logits = np.sort(rng.normal(0, 3, 4))[::-1].astype(np.float32)
        recycling.learn(
            newest[None].astype(np.int32), np.array([3], np.int32), ids[None].astype(np.int32), logits[None]
        )
        naive_table.learn(newest.tolist(), ids.tolist(), logits.tolist())
    of_these = rng.spawn(1)[0]
    entries, naive_bigrams = np.full((alphabet, 6), -1, np.int32), NaiveTable(3)
    for token in range(0, alphabet, 2):
        ids = of_these.choice(alphabet + 3, 3, replace=False)
        logits = np.sort(of_these.normal(0, 3, 3))[::-1].astype(np.float32)
        entries[token] = [*ids, *logits.view(np.int32)]
        naive_bigrams.learn([token], ids.tolist(), logits.tolist())
    bigrams = Bigrams(entries)
    phrases, naive_phrases = PhraseMemory(), NaivePhrases()
    for _ in range(3):
        said = of_these.integers(0, alphabet, 10).tolist()
        phrases.learn(np.array(said, np.int32))
        naive_phrases.learn(said[: loop_start(np.array(said, np.int32))])
    expected_of_class = of_these.gamma(1, 3, (unigram.CLASSES + unigram.PLACES, unigram.CLASSES))
    came = expected_of_class * of_these.uniform(0.5, 1.5, expected_of_class.shape)
    factors = np.stack([came, expected_of_class], axis=-1).reshape(len(came), -1).astype(np.float32)
    classes = of_these.integers(0, unigram.CLASSES, alphabet).astype(np.uint8)
    unigrams = Unigrams(of_these.gamma(1, 5, (RATES, 2)).astype(np.float32), factors, classes)
    naive_unigrams = NaiveUnigrams(dict(enumerate(classes.tolist())))
    naive_unigrams.factors = factor_rows(factors)
    naive_unigrams.rates = {cell: unigrams.rates[row].tolist() for cell, row in rate_rows().items()}
    alignments, naive_alignments = Alignments(), NaiveAlignments()
    split = int(of_these.integers(0, len(text) + 1))
    for part, generated in ((text[:split], False), (text[split:], True)):
        unigram.extend(source_of(unigrams).unigram, np.array(part, np.int32), int(generated))
        naive_unigrams.extend(part, generated)
        alignment.extend(source_of(alignments).alignment, np.array(part, np.int32), int(generated))
        naive_alignments.extend(part, generated)
    asked, naive_asked = RecyclingTable(1 << 8, 3), NaiveTable(3)
    for _ in range(9):
        newest, ids = of_these.integers(0, alphabet, 3), of_these.choice(alphabet + 3, 3, replace=False)
        logits = np.sort(of_these.normal(0, 3, 3))[::-1].astype(np.float32)
        asked.learn(newest[None].astype(np.int32), np.array([3], np.int32), ids[None].astype(np.int32), logits[None])
        naive_asked.learn(newest.tolist(), ids.tolist(), logits.tolist())
    distilled = DistilledTable(asked.sets, np.append(asked.entries.reshape(-1), np.zeros(MOST, np.int32)))
    prediction = Prediction(np.array(expected, np.int32))
    position, matched = int(rng.integers(0, 12)), int(rng.integers(-1, 9))
    ngram, exact = store_rows(stores, 4, 5)
    rows = [prediction.row(2), context.row(0), session.row(1), *exact, recycling.row(3), distilled.row(11)]
    rows += [bigrams.row(10), *ngram]
    rows += [phrases.row(8), unigrams.row(0), alignments.row(9)]
    sources = [
        naive.Prediction(expected, len(text), position, matched),
        naive.Automaton(0, naive_context, shortest=1),
        naive.Automaton(1, naive_session),
        *[naive.Exact(documents, int(row.record["exact"]["min_depth"][0]), len(text)) for row in exact],
        naive.Recycling(naive_table),
        naive.Distilled(naive_asked),
        naive.Bigrams(naive_bigrams),
        *[naive.Ngram(documents) for _ in ngram],
        naive.Phrases(naive_phrases),
        naive_unigrams,
        naive_alignments,
    ]
    held = SourceTable(rows)
    table = held.records
    cursors = np.zeros((len(rows), source_table.CURSOR), np.int64)
    cursors[0, :2] = position, matched
    alignment.best(source_of(alignments).alignment, cursors, len(rows) - 1)
    for token in [0, 0, *text][-2:]:
        cursors[-2, 0] = unigram.place_after(source_of(unigrams).unigram, int(cursors[-2, 0]), token)
    last = context.meta[automaton_kernels.M_LAST]
    cursors[1, :2] = last, context.states[last, automaton_kernels.LENGTH]
    state = matched = 0
    for token in text:
        state, matched = session.advance(state, matched, token)
    cursors[2, :2] = state, matched
    window = np.array(text, np.int32)
    request.follow_all(named_all(table), 3, cursors[3 : 3 + len(exact)], window, len(text))
    return World(text, sources, table, cursors, newest_first(text), [held])


def source_of(source, number=0):
    """The record of a source; hold the source."""
    return named(source.row(number).record)


def named_all(records):
    """Records with fields that can be read as attributes."""
    return records.view(np.dtype((np.record, records.dtype)))


def rate_rows():
    """Rows of the kernel's rates by the naive cells (age, count, generated)."""
    places = itertools.product(enumerate(AGES), enumerate(COUNTS), (False, True))
    return {(i, j, said): unigram.cell_of(age, count, int(said)) for (i, age), (j, count), said in places}


def factor_rows(factors):
    """{(classes behind, class): (came, expected)} of the kernel's factors."""
    found = {}
    for row, pairs in enumerate(factors.reshape(-1, unigram.CLASSES, 2).tolist()):
        behind = (row,) if row < unigram.CLASSES else divmod(row - unigram.CLASSES, unigram.CLASSES)
        found |= {(behind, k): tuple(pair) for k, pair in enumerate(pairs)}
    return found


def learned(rng, strength=5.0):
    """Tables that have learned something."""
    cells = np.zeros((calibration.CELLS, 4), np.float32)
    reached, hit = rng.gamma(1, strength, (2, calibration.CELLS)), rng.random((2, calibration.CELLS))
    cells[:, 1], cells[:, 3] = reached
    cells[:, 0], cells[:, 2] = hit * reached
    summed = rng.gamma(1, strength, (2 * calibration.NUM_SOURCES, calibration.SCALE_BINS + 1))
    scale = np.stack([summed * rng.uniform(0.5, 1.2, summed.shape), summed], axis=-1).astype(np.float32)
    return cells, scale


def fresh(rng):
    """Tables that have seen next to nothing (a little, so that no weight is a round number)."""
    cells, scale = learned(rng, 0.01)
    return cells, np.zeros_like(scale)


def changed_trust(rng):
    """A request that has moved some of the calibration."""
    trust = naive.Trust()
    for number in range(calibration.NUM_SOURCES):
        for length in (0, 6, 30):
            for name in trust.names(number, length):
                trust.factor[name], trust.variance[name] = rng.normal(0, 1), rng.random()
    return trust
