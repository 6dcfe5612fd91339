"""Request schemas, as clients send them: a field is optional unless its dialect demands it.

Unknown fields pass, but for those that ask for what is not served: they are refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StrictBool,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from retrieve_spec.server.sampling import sampler_chain
from retrieve_spec.server.text import line_end, with_line_feeds

UNSUPPORTED = "unsupported_field"

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong item is the only one that is looked at; thousands would take a fifth of a second."""

Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e9, le=1e9)]
Count = Annotated[int, Field(ge=-1, le=1 << 31)]
"""Tokens; -1 is as many as fit."""
Share = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1)]
Text = StrictStr
TokenId = Annotated[int, Field(ge=0, le=1 << 31)]
Stops = Annotated[Items[Text], Field(max_length=256)] | Text | None


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class PredictionPart(_Lenient):
    """A piece of a predicted output."""

    text: Text = ""
    type: str | None = None


class Prediction(_Lenient):
    """The text a client expects (OpenAI's predicted outputs)."""

    content: Text | Items[PredictionPart]
    type: str | None = "content"

    def as_text(self) -> str:
        """The expected text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class _Refusing(_Lenient):
    """A request in which what is not served, but would change the answer, is refused by name."""

    @model_validator(mode="before")
    @classmethod
    def _is_served(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and (names := unserved(fields, cls.model_fields)):
            given = {"names": ", ".join(names)}
            raise PydanticCustomError(UNSUPPORTED, "not served here: {names}; leave it out", given)
        return fields


class Common(_Refusing):
    """Fields of every dialect that asks for text.

    All texts of a request that has been read have line feeds, whatever ends the lines of the document it is about.
    """

    _newline: str = PrivateAttr("\n")

    model: Any = None
    stream: StrictBool | None = None
    temperature: Number | None = None
    top_k: Count | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    stop: Stops = None
    samplers: Items[Text] | Text | None = None
    n_predict: Count | None = None
    n_indent: Annotated[int, Field(ge=0, le=10_000)] | None = None
    t_max_predict_ms: Number | None = None
    cache_prompt: StrictBool | None = None
    id_slot: int | None = Field(None, ge=-1, le=1 << 20)
    response_fields: Items[Text] | None = None
    return_tokens: StrictBool | None = None
    user: Text | None = None
    prediction: Prediction | None = None
    speculative: StrictBool | None = Field(None, description="False decodes plainly; the text is the same.")
    provenance: StrictBool | None = Field(None, description="Say where copied lines stand, and under which licence.")
    deadline_ms: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None

    def written(self, text: str) -> str:
        """A text, or a part of one, with the line ends of the document."""
        return text if self._newline == "\n" else text.replace("\r", "").replace("\n", self._newline)

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, fields: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(fields, dict):
            return check(fields)
        newline = cls._line_end(fields)
        request = check(with_line_feeds(fields) if newline else fields)
        request._newline = newline or "\n"
        return request

    @classmethod
    def _line_end(cls, fields: dict[str, Any]) -> str:
        """How the lines of the document end; "" where it is to be read as it is."""
        return line_end(*_texts([fields.get(name) for name in ("input_prefix", "prompt", "input_suffix", "suffix")]))

    @field_validator("samplers")
    @classmethod
    def _are_known(cls, samplers: list[str] | str | None) -> tuple[str, ...] | None:
        return None if samplers is None else sampler_chain(samplers)

    def wanted_json(self) -> tuple[dict[str, Any] | None, str]:
        """The schema of the JSON that is asked for, None for any text, and the field that asks for it."""
        return None, ""


class ExtraChunk(_Lenient):
    """A piece of another file (`input_extra`); `time` comes in several shapes and is not read."""

    text: Text
    filename: Text | None = None


class InfillRequest(Common):
    """`POST /infill`, llama.cpp's dialect."""

    input_prefix: Text
    input_suffix: Text
    prompt: Text | None = None
    input_extra: Annotated[Items[ExtraChunk], Field(max_length=1024)] | None = None
    n_cmpl: Annotated[int, Field(ge=1, le=16, description="Taken, and answered with one completion.")] | None = None


class CompletionRequest(Common):
    """`POST /completion`, llama.cpp's dialect."""

    prompt: Text | Items[TokenId]
    json_schema: dict[str, Any] | None = None

    def wanted_json(self) -> tuple[dict[str, Any] | None, str]:
        """The schema of the JSON that is asked for; an empty one asks for nothing."""
        return self.json_schema or None, "json_schema"


class StreamOptions(_Lenient):
    """What a stream carries besides text."""

    include_usage: StrictBool | None = None


class NamedSchema(_Lenient):
    """A JSON schema with its name."""

    name: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(_Lenient):
    """What an answer is to be: any text, a JSON object, or JSON under a schema (for llama.cpp beside the type)."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and not (self.schema_ or (self.json_schema and self.json_schema.schema_)):
            raise ValueError("json_schema.schema is required")
        return self


class OpenAIOptions(Common):
    """Fields of both OpenAI dialects."""

    response_format: ResponseFormat | None = None

    max_tokens: Count | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=4)] | None = None

    def wanted_json(self) -> tuple[dict[str, Any] | None, str]:
        """The schema of the JSON that is asked for, None for any text, and the field that asks for it."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None, ""
        given = wanted.json_schema.schema_ if wanted.json_schema else wanted.schema_
        return given or {"type": "object"}, "response_format"


class OpenAICompletionRequest(OpenAIOptions):
    """`POST /v1/completions`."""

    prompt: Text | Items[TokenId] | Annotated[Items[Text], Field(min_length=1, max_length=16)] | None = None
    suffix: Text | None = None


class ContentPart(_Lenient):
    """A piece of a message; only text is read."""

    type: str = "text"
    text: Text = ""


class Message(_Lenient):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Items[ContentPart] | None = None

    def as_text(self) -> str:
        """The text of the turn."""
        content = self.content
        return "".join(part.text for part in content) if isinstance(content, list) else content or ""


class ChatRequest(OpenAIOptions):
    """`POST /v1/chat/completions`."""

    @classmethod
    def _line_end(cls, fields: dict[str, Any]) -> str:
        return line_end(*_texts(fields.get("prediction") or fields.get("messages")))

    messages: Annotated[Items[Message], Field(min_length=1, max_length=1024)]
    max_completion_tokens: Count | None = None


class EditRequest(OpenAIOptions):
    """`POST /v1/edits`: OpenAI's edits, with the name of the file."""

    @classmethod
    def _line_end(cls, fields: dict[str, Any]) -> str:
        text = fields.get("input")
        return line_end(text) if isinstance(text, str) and text.count("\n") == text.count("\r\n") else ""

    input: Text
    instruction: Text
    path: Text | None = Field(None, description="How the file is called in the prompt; it is not opened.")


class TokenizeRequest(_Lenient):
    """`POST /tokenize`."""

    content: Text
    add_special: StrictBool = False
    parse_special: StrictBool = True
    with_pieces: StrictBool = False


class DetokenizeRequest(_Lenient):
    """`POST /detokenize`."""

    tokens: Items[TokenId]


class TemplateRequest(_Refusing):
    """`POST /apply-template`."""

    messages: Annotated[Items[Message], Field(min_length=1, max_length=1024)]


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "tools": (),
    "segments": (),
    "tool_choice": ("none", "auto"),
    "functions": (),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": (),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "best_of": (1,),
    "echo": (False,),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    # vLLM and others
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "stop_token_ids": (),
    "bad_words": (),
    "prompt_logprobs": (0,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "chat_template": (),
    "chat_template_kwargs": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": (),
    "penalty_alpha": (0,),
    # llama.cpp
    "repeat_penalty": (1,),
    "grammar": (),
    "json_schema": (),
    "mirostat": (0,),
    "typical_p": (1,),
    "typ_p": (1,),
    "tfs_z": (1,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "adaptive_target": (-1,),
    "top_n_sigma": (0, -1),
    "n_probs": (0,),
    "lora": (),
    "ignore_eos": (False,),
    "image_data": (),
    "multimodal_data": (),
}
"""Values with which a field asks for nothing; None, "", [] and {} always do."""


_OF_MESSAGES = ("tool_calls", "function_call", "audio")
"""Fields of a message that are more than its text."""
_SEVERAL = ("n", "n_cmpl")
"""Fields that ask for several answers, which some dialects serve under one of these names."""
_JSON = ("response_format", "json_schema")
"""Fields that ask for JSON; each is served by some dialects."""


def unserved(fields: Mapping[str, Any], served: Collection[str] = ()) -> list[str]:
    """Names of the fields of a request that ask for what is not served; parts of messages that are no text too.

    ``served`` are the fields of the dialect.
    """
    asked = {**_NEUTRAL, **{name: (1,) for name in _SEVERAL if name not in served}}
    asked = {name: neutral for name, neutral in asked.items() if not (name in _JSON and name in served)}
    names = [name for name, neutral in asked.items() if name in fields and not _asks_nothing(fields[name], neutral)]
    messages = fields.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else []):
        if not isinstance(message, dict):
            continue
        names += [f"messages.{number}.{name}" for name in _OF_MESSAGES if not _asks_nothing(message.get(name), ())]
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict) and part.get("type", "text") != "text":
                names.append(f"messages.{number}.content ({str(part['type'])[:40]})")
    return names


def _asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    if value is None or value in ("", [], {}):
        return True
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def kind(error: ValidationError) -> str:
    """What kind of mistake it is, as OpenAI calls it."""
    return UNSUPPORTED if error.errors()[0]["type"] == UNSUPPORTED else "invalid_request_error"


def reason(error: ValidationError) -> str:
    """One sentence that says which field is wrong and what it should be.

    Of a field that may be of several types, as far inside it as one of them came.
    """
    errors = error.errors(include_url=False, include_input=False)
    said = max((e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]), key=lambda e: len(e["loc"]))
    path = [str(part) for part in said["loc"] if isinstance(part, int) or _is_field(part)]
    name = '"' + ".".join(path) + '"' if path else "the body"
    known = {
        UNSUPPORTED: said["msg"],
        "missing": f"{name} is required",
        "string_type": f"{name} must be a string",
        "model_type": "the body must be a JSON object",
    }
    return known.get(said["type"], f"{name}: {said['msg'][:1].lower()}{said['msg'][1:]}")


def _is_field(part: str) -> bool:
    """Whether a part of an error's place is a field's name, not that of a type that was tried."""
    return part.islower() and part != "str" and not part.startswith("list[")
