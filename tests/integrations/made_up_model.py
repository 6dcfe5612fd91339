"""A model that engines of these tests serve: its next token is a function of the text."""

from __future__ import annotations


def says(text):
    """The next token: it goes round in circles that the first token chooses, with exceptions."""
    return int((text[-1] + 1 + (len(text) % 23 == 0)) % 9 + 10 * (text[0] // 10))


def plain(prompt, max_new_tokens=40):
    """A prompt and what the model writes without drafts."""
    text = list(prompt)
    for _ in range(max_new_tokens):
        text.append(says(text))
    return text
