"""Prompts as token ids: raw text, conversations, expected texts, and the cursor in them."""

from __future__ import annotations

from collections.abc import Sequence

from retrieve_spec.server.fim import FimVocabulary
from retrieve_spec.server.guard import Refusal
from retrieve_spec.server.schemas import Common, Message
from retrieve_spec.server.text import TextCodec

_PLACE = "<<what the user says>>"
"""Stands for a question while a chat template is filled in, since questions are encoded apart."""


class Prompts:
    """Prompts for one model; what cannot fit is refused by its length, before it is encoded."""

    def __init__(self, codec: TextCodec, fim: FimVocabulary | None, n_ctx: int) -> None:
        self.codec, self.fim, self.n_ctx = codec, fim, n_ctx
        self.most_chars = n_ctx * codec.longest

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; one that cannot fit is refused by its length, before it is encoded.

        Raises
        ------
        Refusal
            400: too long.
        """
        self._fits(len(text))
        return self.codec.encode_prompt(text, add_special_tokens=add_special_tokens)

    def _fits(self, size: int) -> None:
        if size > self.most_chars:
            raise Refusal(
                400,
                f"the prompt has {size} characters; the model reads {self.n_ctx} tokens, which are at most"
                f" {self.most_chars} characters",
                "exceed_context",
            )

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, by the model's own template where it has one."""
        turns = [{"role": m.role, "content": m.as_text()} for m in messages]
        if self._has_template:
            return self.encode(self._templated(turns), add_special_tokens=False)
        self._fits(sum(len(turn["content"]) for turn in turns))
        return self._plain_chat(turns)

    def asked(self, question: str, begun: str) -> list[int]:
        """Token ids of a question, in which nothing is a control token, and of how its answer begins.

        Raises
        ------
        Refusal
            400: too long.
        """
        self._fits(len(question) + len(begun))
        encode = self.codec.encode
        if not self._has_template:
            lead = "" if self._has_chatml else "\n"
            return [*self._plain_chat([{"role": "user", "content": question}]), *encode(lead + begun)]
        before, found, after = self._templated([{"role": "user", "content": _PLACE}]).partition(_PLACE)
        if not found:
            raise Refusal(400, "the model's chat template leaves out what the user says")
        ends = (self.codec.encode_prompt(part, add_special_tokens=False) for part in (before, after))
        return [*next(ends), *encode(question), *next(ends), *encode(begun)]

    @property
    def _has_template(self) -> bool:
        return bool(getattr(self.codec.tokenizer, "chat_template", None))

    @property
    def _has_chatml(self) -> bool:
        return None not in (self.codec.token_id("<|im_start|>"), self.codec.token_id("<|im_end|>"))

    def _templated(self, turns: Sequence[dict[str, str]]) -> str:
        try:
            return str(self.codec.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # templates raise what they like
            raise Refusal(400, f"the model's chat template refuses these messages: {error}") from error

    def _plain_chat(self, turns: Sequence[dict[str, str]]) -> list[int]:
        """ChatML where the vocabulary has it, else turns as paragraphs."""
        start, end = self.codec.token_id("<|im_start|>"), self.codec.token_id("<|im_end|>")
        encode = self.codec.encode
        if start is None or end is None:
            return encode("".join(f"{turn['role']}: {turn['content']}\n\n" for turn in turns) + "assistant:")
        ids: list[int] = []
        for turn in turns:
            ids += [start, *encode(f"{turn['role']}\n{turn['content']}"), end, *encode("\n")]
        return [*ids, start, *encode("assistant\n")]

    def cursor(self, ids: list[int]) -> tuple[list[int], list[int]] | None:
        """What stands before and after the cursor in a prompt that spells fill-in-the-middle tokens.

        Other files in front of it count as standing before.
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
        """Tokens of the text a client expects, behind what was begun; what is too long to be said is left out."""
        if not request.prediction:
            return []
        return self.codec.encode(begun + request.prediction.as_text()[: self.most_chars])
