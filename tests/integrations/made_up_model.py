"""A model that engines of these tests serve, whose next token is a function of the text; and texts of no model."""

import numpy as np
from number_tokens import number_tokenizer

from retrieve_spec.datastore.build import create_datastore
from retrieve_spec.datastore.distilled import add_distilled
from retrieve_spec.datastore.observations import Observations


def says(text):
    """The next token: it goes round in circles that the first token chooses, with exceptions."""
    return int((text[-1] + 1 + (len(text) % 23 == 0)) % 9 + 10 * (text[0] // 10))


def plain(prompt, max_new_tokens=40):
    """A prompt and what the model writes without drafts."""
    text = list(prompt)
    for _ in range(max_new_tokens):
        text.append(says(text))
    return text


def asked(count, limit):
    """Requests by name: prompts of several lengths, and as `limit` how many tokens each may have."""
    prompts = [[10 * (i % 9) + j % 9 for j in range((1, 9, 30, 60)[i % 4])] for i in range(count)]
    return {f"r{i}": {"prompt": prompt, limit: (1, 2, 9, 40, 40)[i % 5]} for i, prompt in enumerate(prompts)}


def repeating_texts(rng, rows, length):
    """(rows, length) int32 over a few tokens, with a part that comes twice; no two rows have a token in common."""
    made = np.zeros((rows, length), np.int32)
    for row in range(rows):
        made[row] = rng.integers(0, int(rng.integers(2, 8)), length) + 100 * row
        made[row, length // 2 : length // 2 + 30] = made[row, 10:40]
    return made


def distilled_store(folder, texts, top_ids):
    """A store without documents, and a table of which (tokens, 2) are most probable after each token of some texts."""
    create_datastore(folder, number_tokenizer())
    probs = np.tile(np.array([0.75, 0.125], np.float16), (len(top_ids), 1))
    lengths, ids = np.array([len(text) for text in texts]), np.concatenate(texts).astype(np.int32)
    add_distilled(Observations(ids, lengths, top_ids.astype(np.int32), probs), 1 << 12, folder, "model:1")
    return folder
