"""Prompts as token ids: raw text, conversations, predictions, and fill-in-the-middle prompts."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from retrieve_spec.server.chat_template import ChatTemplate, leading_instructions
from retrieve_spec.server.guard import Refusal, TooLong
from retrieve_spec.server.reading import THOUGHTS, Thinking, thinking_after
from retrieve_spec.server.sampling import Beginnings
from retrieve_spec.server.schemas import Common, Conversation, ExtraChunk
from retrieve_spec.server.text import HiddenText, TextCodec


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as token ids, and the thought that may follow."""

    token_ids: list[int]
    thinking: Thinking = field(default_factory=Thinking)


class Prompts:
    """Makes prompts for one model."""

    def __init__(self, codec: TextCodec, fim: FimVocabulary | None, n_ctx: int) -> None:
        self.codec, self.fim, self.n_ctx = codec, fim, n_ctx
        self.most_chars = n_ctx * codec.longest
        self.template = ChatTemplate(codec.tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a prompt; one that cannot fit is refused by its length in characters, before it is encoded.

        Raises
        ------
        TooLong
            400.
        """
        self._fits(len(text))
        return self.codec.encode_prompt(text, add_special_tokens=add_special_tokens)

    def _fits(self, size: int) -> None:
        if size > self.most_chars:
            raise TooLong(-(-size // self.codec.longest), self.n_ctx)

    def chat(self, conversation: Conversation) -> ChatPrompt:
        """Return a conversation as a prompt, by the model's chat template if it has one.

        Raises
        ------
        Refusal
            400: it is too long, or the template rejects the turns.
        """
        turns, tools, rendering = conversation.messages, conversation.offered_tools, conversation.rendering()
        if not self.template.text:
            turns = self.template.shaped(turns, tools)
            self._fits(sum(len(turn["content"]) for turn in turns))
            return ChatPrompt(self._plain_chat(turns, **rendering))
        begun = turns[-1]["content"] if rendering["continue_final_message"] else ""
        hidden = HiddenText(self.codec, kept_in_answers=[tag for tags in THOUGHTS for tag in (tags.opens, tags.close)])
        turns, tools = hidden.of_turns(turns), hidden.of(tools)
        try:
            prompt = self.template.render(turns, tools, **rendering)
        except Exception as error:  # templates may raise anything
            raise Refusal(400, f"the model's chat template refuses these messages: {error}") from error
        thinking = thinking_after(prompt, self.template.traits.thoughts, begun)
        self._fits(len(prompt))
        return ChatPrompt(hidden.encoded(prompt), thinking)

    def instructions(self, conversation: Conversation) -> list[int]:
        """Return the prompt of another question after the same instructions and tools.

        Prompts of all chats of one agent begin with it. Empty without instructions and tools, or for a later turn.
        """
        said = conversation.messages
        head = leading_instructions(said)
        if not (head or conversation.offered) or any(turn["role"] == "assistant" for turn in said):
            return []
        asked = {"role": "user", "content": _NEVER_SAID}
        return self.chat(conversation.model_copy(update={"messages": [*head, asked]})).token_ids

    def opening(self, conversation: Conversation) -> list[int]:
        """Return the tokens that begin the model's turn; the next prompt may continue differently before them."""
        return self.codec.encode_prompt(self.template.opening(**conversation.rendering()), add_special_tokens=False)

    def _plain_chat(
        self,
        turns: Sequence[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **_: Any,
    ) -> list[int]:
        """Render as ChatML if the vocabulary has it, else as paragraphs."""
        start, end = self.codec.token_id("<|im_start|>"), self.codec.token_id("<|im_end|>")
        encode = self.codec.encode
        if start is None or end is None:
            text = "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
            text += "" if continue_final_message else "\n\n"
            return encode(text + ("assistant:" if add_generation_prompt else ""))
        ids: list[int] = []
        for turn in turns:
            ids += [start, *encode(f"{turn['role']}\n{turn['content']}"), end, *encode("\n")]
        if continue_final_message:
            return ids[: -1 - len(encode("\n"))]
        return [*ids, start, *encode("assistant\n")] if add_generation_prompt else ids

    def cursor(self, ids: list[int]) -> tuple[list[int], list[int]] | None:
        """Return the tokens before and after the cursor in a prompt with fill-in-the-middle tokens.

        Other files before it count as text before the cursor.
        """
        fim = self.fim
        if fim is None or fim.prefix not in ids or fim.suffix not in ids:
            return None
        last = len(ids) - 1 if fim.middle is not None and ids[-1] == fim.middle else len(ids)
        prefix, suffix = ids.index(fim.prefix), ids.index(fim.suffix)
        if prefix < suffix:
            return [*ids[:prefix], *ids[prefix + 1 : suffix]], ids[suffix + 1 : last]
        return [*ids[:suffix], *ids[prefix + 1 : last]], ids[suffix + 1 : prefix]

    def expected(self, request: Common, begun: str = "") -> list[int]:
        """Encode a prediction without the begun word; text beyond the context is left out."""
        if not request.prediction:
            return []
        return self.codec.encode(begun + request.prediction.as_text()[: self.most_chars])


_NEVER_SAID = "\ue000"
SNIPPET = "\n\n--- snippet ---\n\n"
PROJECT_NAME = "myproject"
FILE_NAME = "filename"
UNNAMED_CHUNK = "tmp"
_CHARS_PER_TOKEN = 3
_EXTRA_WINDOWS = 4
"""Size of other files, as a multiple of the current file's."""
_MOST_BEHIND, _LEAST_BEHIND = 1280, 96
"""Characters before the cursor that may follow the suffix. The more lines there are to choose from, the longer the
chosen one stays the same; the suffix is read again whenever it changes."""


@dataclass(frozen=True, slots=True)
class FimFormat:
    """How one family of models writes fill-in-the-middle prompts.

    Attributes
    ----------
    family
        Name shown to users.
    prefix, suffix, middle
        Control tokens; ``middle`` may be absent (Codestral).
    repo, sep
        Control tokens of prompts at repository level, if the family has them.
    end
        Further tokens that end a completion.
    requires
        Tokens that distinguish this family from others with the same control tokens.
    suffix_first
        Whether the suffix comes before the prefix.
    path_inside
        Whether the path of the current file follows the prefix token instead of preceding it (StarCoder2).
    sections
        Whether other files are ``+++++ path`` sections (Codestral).
    """

    family: str
    prefix: str
    suffix: str
    middle: str | None
    repo: str | None = None
    sep: str | None = None
    end: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    suffix_first: bool = False
    path_inside: bool = False
    sections: bool = False

    @property
    def needed(self) -> tuple[str, ...]:
        """Every token that the vocabulary must have."""
        core = (self.prefix, self.suffix) + ((self.middle,) if self.middle else ())
        return core + self.requires

    def spells(self, prompt: str) -> bool:
        """Whether a prompt has these tokens: it ends with the middle token, or begins with the suffix token."""
        prefix, suffix = self.prefix.lstrip("▁"), self.suffix.lstrip("▁")
        if self.middle is None:
            return prompt.lstrip().startswith(suffix) and prefix in prompt
        return prompt.rstrip().endswith(self.middle.lstrip("▁")) and prefix in prompt and suffix in prompt


_PIPE = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_STAR = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
_DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")

FORMATS: tuple[FimFormat, ...] = (
    FimFormat(
        "qwen",
        *_PIPE,
        repo="<|repo_name|>",
        sep="<|file_sep|>",
        requires=("<|file_sep|>",),
        end=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|im_end|>", "<|endoftext|>"),
    ),
    FimFormat("codegemma", *_PIPE, requires=("<|file_separator|>",), end=("<|file_separator|>", *_PIPE, "<eos>")),
    FimFormat("granite", *_PIPE, requires=("<|end_of_text|>",), end=("<|end_of_text|>", "<|fim_pad|>")),
    FimFormat("fim", *_PIPE, end=("<|fim_pad|>", "<|endoftext|>", "<|im_end|>")),
    FimFormat("santacoder", "<fim-prefix>", "<fim-suffix>", "<fim-middle>", end=("<fim-pad>", "<|endoftext|>")),
    FimFormat(
        "starcoder2",
        *_STAR,
        repo="<repo_name>",
        sep="<file_sep>",
        requires=("<file_sep>", "<repo_name>"),
        end=("<file_sep>", "<fim_pad>", "<repo_name>", "<|endoftext|>"),
        path_inside=True,
    ),
    FimFormat("starcoder", *_STAR, end=("<|endoftext|>", "<fim_pad>", "<file_sep>")),
    FimFormat("deepseek", *_DEEPSEEK, end=("<｜end▁of▁sentence｜>", "<|EOT|>")),
    FimFormat("codellama", "▁<PRE>", "▁<SUF>", "▁<MID>", end=("▁<EOT>", "</s>")),
    FimFormat("codellama", "<PRE>", "<SUF>", "<MID>", end=("<EOT>", "</s>")),
    FimFormat("codestral", "[PREFIX]", "[SUFFIX]", None, end=("</s>",), suffix_first=True, sections=True),
    FimFormat("glm", "<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", end=("<|endoftext|>", "<|user|>")),
    FimFormat(
        "seed-coder",
        "<[fim-prefix]>",
        "<[fim-suffix]>",
        "<[fim-middle]>",
        end=("<[end▁of▁sentence]>",),
        suffix_first=True,
    ),
    FimFormat("falcon", "<|prefix|>", "<|suffix|>", "<|middle|>", end=("<|endoftext|>",)),
)


@dataclass(frozen=True, slots=True)
class FimVocabulary:
    """A format with its control tokens as ids of one vocabulary."""

    fmt: FimFormat
    prefix: int
    suffix: int
    middle: int | None
    repo: int | None
    sep: int | None
    bos: int | None
    end: frozenset[int] = field(default_factory=frozenset)


def find_format(codec: TextCodec) -> FimVocabulary | None:
    """Return the first format of the table whose tokens the vocabulary has, None for a model that cannot infill."""
    ids = codec.vocab
    fmt = next((fmt for fmt in FORMATS if ids.keys() >= set(fmt.needed)), None)
    if fmt is None:
        return None
    middle, repo, sep = (ids.get(token or "") for token in (fmt.middle, fmt.repo, fmt.sep))
    end = frozenset(ids[token] for token in (*fmt.end, fmt.repo, fmt.sep) if token in ids)
    return FimVocabulary(fmt, ids[fmt.prefix], ids[fmt.suffix], middle, repo, sep, _bos(codec), end)


def unknown_format(codec: TextCodec, prompt: str) -> bool:
    """Whether a prompt uses a fill-in-the-middle format, but none of this vocabulary."""
    spelled = [fmt for fmt in FORMATS if fmt.spells(prompt)]
    return bool(spelled) and all(
        any(codec.token_id(token) is None for token in (fmt.prefix, fmt.suffix, fmt.middle) if token) for fmt in spelled
    )


def _bos(codec: TextCodec) -> int | None:
    """Return the begin-of-text id if the tokenizer adds it to a prompt."""
    bos = codec.tokenizer.bos_token_id
    return bos if bos is not None and codec.encode_prompt("a")[:1] == [bos] else None


@dataclass(frozen=True, slots=True)
class FimParts:
    """Texts at the cursor: before it, after it, and excerpts of other files, least recent first."""

    prefix: str
    suffix: str
    extra: tuple[ExtraChunk, ...] = ()


@dataclass(frozen=True, slots=True)
class FimPrompt:
    """A fill-in-the-middle prompt.

    Attributes
    ----------
    token_ids
        The prompt.
    context_ids
        The same text for the drafter: without control tokens, and with the prefix last, which says more about the next
        tokens than the suffix.
    truncated
        Whether a part was cut.
    begun
        The end of the prefix that is not in the prompt; the answer begins with it, in tokens of the model's choice.
    """

    token_ids: list[int]
    context_ids: list[int]
    truncated: bool
    begun: str = ""


_LINE = re.compile(r"(?<=\n)[^\n]+")


def stable_start(text: str, first: int, last: int) -> int | None:
    """Return a line start between two places, chosen by the content of lines; None if there is none.

    It is the one whose line has the smallest checksum (winnowing; Schleimer, Wilkerson, Aiken, 2003), so it stays the
    same while the window slides.
    """
    lines = takewhile(lambda line: line.start() < last, _LINE.finditer(text, max(first, 0)))
    scored = [(zlib.crc32(line[0].encode("utf-8", "surrogatepass")), line.start()) for line in lines if line[0].strip()]
    return min(scored)[1] if scored else None


def stable_tail(text: str, max_chars: int) -> str:
    """Return the last lines of a text, at least three quarters of a budget, with a cut that later keystrokes keep.

    A window of fixed length that ends at the cursor would start one token later with every key, and the model would
    read everything again.
    """
    if len(text) <= max_chars:
        return text
    first = len(text) - max_chars
    start = stable_start(text, first, len(text) - max_chars * 3 // 4)
    return text[first if start is None else start :]


def anchor(prefix: str, most: int) -> int:
    """Return the line start from which lines follow the suffix; it stays the same for many keystrokes."""
    line = prefix.rfind("\n") + 1
    if len(prefix) <= most:
        return 0
    start = stable_start(prefix, len(prefix) - most, min(line, len(prefix) - min(_LEAST_BEHIND, most // 2)))
    return line if start is None else start


def _head(text: str, max_chars: int) -> str:
    """Return the first lines of a text within a budget."""
    if len(text) <= max_chars:
        return text
    cut = text.rfind("\n", 0, max_chars)
    return text[: cut + 1 if cut > max_chars // 2 else max_chars]


def _first_kept(sizes: Sequence[int], room: int) -> int:
    """Return the index of the first of the last items that fit a budget together."""
    first = len(sizes)
    while first and sizes[first - 1] <= room:
        first -= 1
        room -= sizes[first]
    return first


class FimAssembler:
    """Makes prompts in a model's fill-in-the-middle format.

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
    beginnings
        Finds begun words, which the answer repeats; None: all of the prefix is in the prompt.

    Notes
    -----
    A suffix after the prefix would be read again with every key. So the last lines of the prefix follow the suffix, as
    the beginning of the middle, and what is typed only extends the cached prompt. The place where they begin is chosen
    as in `stable_tail`. Models are not trained on middles that begin inside a word; the answer repeats that word.
    """

    def __init__(
        self, codec: TextCodec, vocabulary: FimVocabulary, n_ctx: int, window: int, prefix_share: float = 0.75,
        beginnings: Beginnings | None = None,
    ) -> None:  # fmt: skip
        self.codec = codec
        self.vocabulary = vocabulary
        self.n_ctx = n_ctx
        self.window = min(window, n_ctx // 2)
        self._beginnings = beginnings if beginnings is not None and beginnings.possible else None
        self._before = int(self.window * prefix_share)
        self._after = self.window - self._before

    def assemble(self, parts: FimParts, n_predict: int, *, heal: bool = True) -> FimPrompt:
        """Return the prompt for the text between prefix and suffix.

        Without ``heal`` all of the prefix is in it, in the format's order. ``parts.prefix`` ends at the cursor.
        Segments are encoded one by one.
        """
        v, fmt = self.vocabulary, self.vocabulary.fmt
        prefix_text = stable_tail(parts.prefix, self._before * _CHARS_PER_TOKEN)
        suffix_text = _head(parts.suffix, self._after * _CHARS_PER_TOKEN)
        begun = ""  # the part of the cursor's line that the model writes
        if heal and self._beginnings is not None:
            begun = self._beginnings.of(prefix_text[prefix_text.rfind("\n") + 1 :])
        prefix, middle = self._divided(
            prefix_text[: len(prefix_text) - len(begun)], heal and self._beginnings is not None
        )
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
        # A begin-of-text token stands before the fill-in-the-middle part, after the other files (llama.cpp #11106).
        ids = [*extra, *bos, *body] if extra else [*bos, *body]
        if v.middle is not None:
            ids += [v.middle, *middle]
        cut = len(prefix_text) < len(parts.prefix) or len(suffix_text) < len(parts.suffix)
        return FimPrompt(ids, [*extra, *suffix, *prefix, *middle], dropped or cut, begun)

    def _divided(self, text: str, heals: bool) -> tuple[list[int], list[int]]:
        """Divide the text before the cursor into what comes before the suffix, and after it."""
        most = min(_MOST_BEHIND, self._before)
        if heals and not self.vocabulary.fmt.suffix_first:
            at = anchor(text, most)
            middle = self._encode_lines(text[at:]) if len(text) - at <= most else []
            if 0 < len(middle) <= most // _CHARS_PER_TOKEN:
                return self._capped(self._encode_lines(text[:at]), self._before - most // _CHARS_PER_TOKEN), middle
        return self._capped(self._encode_lines(text), self._before), []

    def _encode_lines(self, text: str) -> list[int]:
        """Encode a text whose last line is being typed: apart, so that the tokens of earlier lines stay equal."""
        line = text.rfind("\n") + 1
        return [*self.codec.encode_cached(text[:line]), *self.codec.encode(text[line:])]

    def _capped(self, ids: list[int], limit: int) -> list[int]:
        """Drop whole blocks from the front, so that the cut moves once in many keystrokes."""
        if len(ids) <= limit:
            return ids
        block = max(1, limit // 4)
        return ids[-(-(len(ids) - limit) // block) * block :]

    def _extra(self, chunks: Sequence[ExtraChunk], room: int) -> tuple[list[int], bool]:
        """Encode other files in the model's format; the most recent are kept if there is no room for all."""
        v, fmt = self.vocabulary, self.vocabulary.fmt
        too_long = _first_kept([len(chunk.text) for chunk in chunks], room * self.codec.longest)
        packed = [self._packed(chunk) for chunk in chunks[too_long:]]
        if not packed and not (v.sep is not None and not fmt.path_inside):
            return [], False
        head: list[int] = []
        if v.repo is not None and v.sep is not None:
            head = [v.repo, *self.codec.encode_cached(PROJECT_NAME + ("" if fmt.path_inside else "\n"))]
        first = _first_kept(list(map(len, packed)), room - len(head))
        kept = [i for ids in packed[first:] for i in ids]
        return (head + kept if kept or not fmt.path_inside else kept), first + too_long > 0

    def _packed(self, chunk: ExtraChunk) -> list[int]:
        """Encode an excerpt of another file in the model's format."""
        name, sep = chunk.filename or UNNAMED_CHUNK, self.vocabulary.sep
        if sep is not None:
            return [sep, *self.codec.encode_cached(f"{name}\n{chunk.text}")]
        section = f"+++++ {name}\n{chunk.text}\n"
        return self.codec.encode_cached(section if self.vocabulary.fmt.sections else SNIPPET + chunk.text)
