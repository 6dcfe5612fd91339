"""Turns prefix, suffix and chunks of other files into the fill-in-the-middle prompt a model was trained on."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from retrieve_spec.server.fim_formats import FimVocabulary
from retrieve_spec.server.text import TextCodec

SNIPPET = "\n\n--- snippet ---\n\n"
PROJECT_NAME = "myproject"
FILE_NAME = "filename"
UNNAMED_CHUNK = "tmp"
_CHARS_PER_TOKEN = 3
_EXTRA_WINDOWS = 4
"""Other files may take so many times the room of the current one."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of another file sent along by the editor."""

    text: str
    filename: str | None = None


@dataclass(frozen=True, slots=True)
class FimParts:
    """What an editor knows at the cursor: text before it, after it, and pieces of other files, least recent first."""

    prefix: str
    suffix: str
    extra: tuple[Chunk, ...] = ()


@dataclass(frozen=True, slots=True)
class FimPrompt:
    """An assembled prompt.

    Attributes
    ----------
    token_ids
        What the model reads.
    context_ids
        The same text without control tokens of the format, the prefix last: what a drafter reads, since the text
        before the cursor says more about what comes next than the suffix that ends the prompt.
    truncated
        Whether a part had to be cut.
    """

    token_ids: list[int]
    context_ids: list[int]
    truncated: bool


def stable_tail(text: str, max_chars: int) -> str:
    """The last lines of a text, cut where the next keystrokes will cut it too.

    A window that ends at the cursor would start one token later with every key and make the model read everything
    again. Among the line starts that keep three quarters of the budget or more, the one whose line has the smallest
    checksum is taken (winnowing; Schleimer, Wilkerson, Aiken, 2003): it stays the same while the window slides.
    """
    if len(text) <= max_chars:
        return text
    first, last = len(text) - max_chars, len(text) - max_chars * 3 // 4
    best: tuple[int, int] | None = None
    at = text.find("\n", first - 1)
    while 0 <= at < last - 1:
        end = text.find("\n", at + 1)
        line = text[at + 1 : end if end >= 0 else len(text)]
        score = zlib.crc32(line.encode("utf-8", "surrogatepass"))
        if line.strip() and (best is None or score < best[0]):
            best = (score, at + 1)
        at = end
    return text[best[1] if best else first :]


def _head(text: str, max_chars: int) -> str:
    """The first lines of a text within a budget."""
    if len(text) <= max_chars:
        return text
    cut = text.rfind("\n", 0, max_chars)
    return text[: cut + 1 if cut > max_chars // 2 else max_chars]


def _latest(chunks: Sequence[Chunk], max_chars: int) -> Sequence[Chunk]:
    """The last chunks that may fit by their length: what cannot is not encoded."""
    first, total = len(chunks), 0
    while first and total + len(chunks[first - 1].text) <= max_chars:
        first -= 1
        total += len(chunks[first].text)
    return chunks[first:]


class FimAssembler:
    """Builds prompts in a model's own fill-in-the-middle format.

    Parameters
    ----------
    codec
        Text codec of the model.
    vocabulary
        The format found in it.
    n_ctx
        Positions of the model.
    window
        Tokens of prefix and suffix together, at most.
    prefix_share
        Share of the prefix in them.
    """

    def __init__(
        self, codec: TextCodec, vocabulary: FimVocabulary, n_ctx: int, window: int, prefix_share: float = 0.75
    ) -> None:
        self.codec = codec
        self.vocabulary = vocabulary
        self.n_ctx = n_ctx
        self.window = min(window, n_ctx // 2)
        self._before = int(self.window * prefix_share)
        self._after = self.window - self._before

    def assemble(self, parts: FimParts, n_predict: int) -> FimPrompt:
        """Token ids of the prompt that asks for the text between prefix and suffix.

        The current line left of the cursor belongs to ``parts.prefix``. Segments are encoded one by one.
        """
        v, fmt = self.vocabulary, self.vocabulary.fmt
        prefix_text = stable_tail(parts.prefix, self._before * _CHARS_PER_TOKEN)
        suffix_text = _head(parts.suffix, self._after * _CHARS_PER_TOKEN)
        line = prefix_text.rfind("\n") + 1  # encoded apart, as llama.cpp does: the text above stays as it was
        above = self.codec.encode_cached(prefix_text[:line], grows=True)
        prefix = self._capped([*above, *self.codec.encode(prefix_text[line:])], self._before)
        suffix = self.codec.encode_cached(suffix_text)[: self._after]
        room = max(0, self.n_ctx - self.window - 2 * max(n_predict, 16) - 16)
        room = min(room, _EXTRA_WINDOWS * self.window)
        extra, dropped = self._extra(parts.extra, room)
        name = self.codec.encode_cached(FILE_NAME + "\n")
        if v.sep is not None and not fmt.path_inside:
            extra = [*extra, v.sep, *name]
        elif v.sep is not None and extra:
            extra = [*extra, v.sep]
            prefix = [*name, *prefix]
        before, after = [v.prefix, *prefix], [v.suffix, *suffix]
        body = [*after, *before] if fmt.suffix_first else [*before, *after]
        bos = [] if v.bos is None else [v.bos]
        # A begin-of-text token stands before the fill-in-the-middle part, behind the other files (llama.cpp #11106).
        ids = [*extra, *bos, *body] if extra else [*bos, *body]
        if v.middle is not None:
            ids.append(v.middle)
        cut = len(prefix_text) < len(parts.prefix) or len(suffix_text) < len(parts.suffix)
        return FimPrompt(ids, [*extra, *suffix, *prefix], dropped or cut)

    def _capped(self, ids: list[int], limit: int) -> list[int]:
        """Drop whole blocks from the front, so that the cut moves once in many keystrokes."""
        if len(ids) <= limit:
            return ids
        block = max(1, limit // 4)
        return ids[-(-(len(ids) - limit) // block) * block :]

    def _extra(self, chunks: Sequence[Chunk], room: int) -> tuple[list[int], bool]:
        """Other files in the model's packing, the latest kept when there is no room for all."""
        v, fmt = self.vocabulary, self.vocabulary.fmt
        packed: list[list[int]] = []
        chunks, all_chunks = _latest(chunks, room * self.codec.longest), len(chunks)
        for chunk in chunks:
            if v.sep is not None:
                ids = [v.sep, *self.codec.encode_cached(f"{chunk.filename or UNNAMED_CHUNK}\n{chunk.text}")]
            elif fmt.sections:
                ids = self.codec.encode_cached(f"+++++ {chunk.filename or UNNAMED_CHUNK}\n{chunk.text}\n")
            else:
                ids = self.codec.encode_cached(SNIPPET + chunk.text)
            packed.append(ids)
        if not packed and not (v.sep is not None and not fmt.path_inside):
            return [], False
        head: list[int] = []
        if v.repo is not None and v.sep is not None:
            head = [v.repo, *self.codec.encode_cached(PROJECT_NAME + ("" if fmt.path_inside else "\n"))]
        total, first = len(head), len(packed)
        while first and total + len(packed[first - 1]) <= room:
            first -= 1
            total += len(packed[first])
        kept = [i for ids in packed[first:] for i in ids]
        return (head + kept if kept or not fmt.path_inside else kept), first > 0 or len(chunks) < all_chunks
