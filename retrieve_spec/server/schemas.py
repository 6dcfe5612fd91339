"""Requests as clients send them, and the answers that each dialect's clients read.

A field of a request is optional unless its dialect demands it. Unknown fields pass, but for those that ask for what is
not served: they are refused by name.
"""

from __future__ import annotations

import inspect
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import pydantic_core
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from transformers import PreTrainedTokenizerBase

from retrieve_spec.server.guard import Refusal
from retrieve_spec.server.jobs import Completion, Delta
from retrieve_spec.server.logprobs import LogProbWriter, TokenLogProb
from retrieve_spec.server.sampling import sampler_chain
from retrieve_spec.server.text import line_end, with_line_feeds, with_texts
from retrieve_spec.server.tools import CallParser, Said, ToolCall

UNSUPPORTED = "unsupported_field"

T = TypeVar("T")
Schema = TypeVar("Schema", bound=BaseModel)
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong item is the only one that is looked at; thousands would take a fifth of a second."""

Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e9, le=1e9)]
Count = Annotated[int, Field(ge=-1, le=1 << 31)]
"""Tokens; -1 is as many as fit."""
Share = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1)]
Penalty = Annotated[float, Field(allow_inf_nan=False, ge=-2, le=2)]
Bias = Annotated[float, Field(allow_inf_nan=False, ge=-100, le=100)]
TopTokens = Annotated[StrictInt, Field(ge=0, le=20)]
Text = StrictStr
FunctionName = Annotated[str, Field(pattern=r"^[\w.:/-]{1,128}$")]
TokenId = Annotated[int, Field(ge=0, le=1 << 31)]
Stops = Annotated[Items[Text], Field(max_length=256)] | Text | None


class Lenient(BaseModel):
    """What clients send, whatever else stands in it."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class TextPart(Lenient):
    """A piece of a message or of a predicted output; only text is read."""

    type: str | None = "text"
    text: Text = ""


def text_of(content: str | Sequence[TextPart] | None) -> str:
    """The text of a content that may come in pieces."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class Spoken(Lenient):
    """What somebody says, or will say."""

    content: Text | Items[TextPart] | None = None

    def as_text(self) -> str:
        """Its text."""
        return text_of(self.content)


class Prediction(Spoken):
    """The text a client expects (OpenAI's predicted outputs)."""

    content: Text | Items[TextPart]
    type: str | None = "content"


class Refusing(Lenient):
    """A request in which what is not served, but would change the answer, is refused by name."""

    _also: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Further fields that are not served in a dialect, with values that ask for nothing."""
    _parts: ClassVar[tuple[str, ...]] = ("text",)
    """Types of the parts of messages that are read."""

    @model_validator(mode="before")
    @classmethod
    def _is_served(cls, fields: Any) -> Any:
        names = unserved(fields, cls.model_fields, cls._also, cls._parts) if isinstance(fields, dict) else []
        if names:
            given = {"names": ", ".join(names)}
            raise PydanticCustomError(UNSUPPORTED, "not served here: {names}; leave it out", given)
        return fields


class Common(Refusing):
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
    max_tokens: Count | None = None
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
    store: Text | None = Field(None, description="A datastore to draft from besides, by the name it is served under.")

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

    def wanted_logprobs(self) -> int | None:
        """How many of the most probable tokens each token is to come with; None without log-probabilities."""
        return None


class ExtraChunk(Lenient):
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


class StreamOptions(Lenient):
    """What a stream carries besides text."""

    include_usage: StrictBool | None = None


class NamedSchema(Lenient):
    """A JSON schema with its name."""

    name: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Lenient):
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

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=1024)] | None = None

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
    logprobs: StrictBool | TopTokens | None = None
    echo: StrictBool | None = None

    def wanted_logprobs(self) -> int | None:
        """How many of the most probable tokens each token is to come with; None without log-probabilities."""
        return None if self.logprobs is None or self.logprobs is False else int(self.logprobs)

    @model_validator(mode="after")
    def _echoes_what_it_knows(self) -> Self:
        if self.echo and self.wanted_logprobs() is not None:
            raise ValueError("echo with logprobs: those of the prompt are not served")
        return self


class _Whole(BaseModel):
    """What is handed to chat templates with all that a client says of it."""

    model_config = ConfigDict(extra="allow")


class Function(_Whole):
    """What a model may call: its name, what it does, and the JSON schema of its arguments."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Whole):
    """A function with its type, the only one there is."""

    type: Literal["function"]
    function: Function


class CalledFunction(_Whole):
    """A function and what it was given: an object, as it is or spelled in JSON."""

    name: Text
    arguments: dict[str, Any] | Text = "{}"

    @field_validator("arguments")
    @classmethod
    def _are_an_object(cls, given: dict[str, Any] | str) -> dict[str, Any]:
        read = pydantic_core.from_json(given or "{}") if isinstance(given, str) else given
        if not isinstance(read, dict):
            raise ValueError("not the JSON of an object")
        return read


class MadeCall(_Whole):
    """A call in a conversation."""

    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Spoken):
    """One turn of a conversation; what else is said of it goes to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    tool_calls: Annotated[Items[MadeCall], Field(max_length=256)] | None = None

    def as_turn(self) -> dict[str, Any]:
        """The turn as chat templates read it."""
        said = {name: value for name, value in self.model_dump().items() if value not in (None, [])}
        return {**said, "content": self.as_text()}


class Conversation(Lenient):
    """Messages, and how they become a prompt."""

    messages: Annotated[Items[Message], Field(min_length=1, max_length=1024)]
    tools: Annotated[Items[Tool], Field(max_length=256)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = Field(
        None, description="Go on with the last message; if it is an assistant's, unless this is false."
    )

    @property
    def offered(self) -> dict[str, Tool]:
        """The tools that may be called, by name."""
        return {} if self.tool_choice == "none" else {tool.function.name: tool for tool in self.tools or ()}

    @property
    def named(self) -> str | None:
        """The one function that must be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else None

    def rendering(self) -> dict[str, Any]:
        """Arguments of `Prompts.chat`: besides the template's own, tools and what stands at the end."""
        last, begins = self.messages[-1], self.add_generation_prompt
        begun = last.role == "assistant" and not (last.tool_calls or begins)
        goes_on = begun if self.continue_final_message is None else self.continue_final_message
        tools = [tool.model_dump(exclude_unset=True) for tool in self.offered.values()]
        return {
            **(self.chat_template_kwargs or {}),
            **({"tools": tools} if tools else {}),
            "add_generation_prompt": begins is not False and not goes_on,
            "continue_final_message": goes_on,
        }

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        names, last = [tool.function.name for tool in self.tools or ()], self.messages[-1]
        if len(set(names)) < len(names):
            raise ValueError("tools: two have the same name")
        if (self.tool_choice == "required" and not names) or self.named not in (None, *names):
            raise ValueError("tool_choice: there is no such tool among tools")
        if self.continue_final_message and (last.role != "assistant" or last.tool_calls or self.add_generation_prompt):
            raise ValueError(
                "continue_final_message: the last message is to be an assistant's, without tool_calls, and"
                " add_generation_prompt left out"
            )
        if taken := _ARGUMENTS & (self.chat_template_kwargs or {}).keys():
            raise ValueError(f"chat_template_kwargs: {min(taken)} is no variable of a template's own")
        return self


class ChatRequest(Conversation, OpenAIOptions):
    """`POST /v1/chat/completions`."""

    @classmethod
    def _line_end(cls, fields: dict[str, Any]) -> str:
        return line_end(*_texts(fields.get("prediction") or fields.get("messages")))

    max_completion_tokens: Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: TopTokens | None = None
    parallel_tool_calls: StrictBool | None = Field(
        None, description="False allows one call only, where a call is required."
    )

    def wanted_logprobs(self) -> int | None:
        """How many of the most probable tokens each token is to come with; None without log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _asks_for_one_thing(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs: true")
        if self.offered and self.wanted_json()[0] is not None:
            raise ValueError("response_format: not beside tools")
        return self


class EditRequest(OpenAIOptions):
    """`POST /v1/edits`: OpenAI's edits, with the name of the file."""

    @classmethod
    def _line_end(cls, fields: dict[str, Any]) -> str:
        text = fields.get("input")
        return line_end(text) if isinstance(text, str) and text.count("\n") == text.count("\r\n") else ""

    input: Text
    instruction: Text
    path: Text | None = Field(None, description="How the file is called in the prompt; it is not opened.")


class TokenizeRequest(Lenient):
    """`POST /tokenize`."""

    content: Text
    add_special: StrictBool = False
    parse_special: StrictBool = True
    with_pieces: StrictBool = False


class DetokenizeRequest(Lenient):
    """`POST /detokenize`."""

    tokens: Items[TokenId]


class TemplateRequest(Conversation, Refusing):
    """`POST /apply-template`."""


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "n": (1,),
    "n_cmpl": (1,),
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
    "min_keep": (0, 1),
    "image_data": (),
    "multimodal_data": (),
}
"""Values with which a field asks for nothing; None, "", [] and {} always do."""


_OF_MESSAGES = ("function_call", "audio")
"""Fields of a message that are no text, and are not served."""
_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def unserved(
    fields: Mapping[str, Any],
    served: Collection[str],
    also: Mapping[str, tuple[Any, ...]],
    parts: Collection[str],
) -> list[str]:
    """Names of the fields of a request that ask for what is not served; parts of messages of other types too.

    ``served`` are the fields of the dialect, ``also`` further ones that it has and that are not served.
    """
    kept = {**_NEUTRAL, **also}
    asked = {name: kept[name] for name in kept if name in fields and (name in also or name not in served)}
    names = [name for name, neutral in asked.items() if not _asks_nothing(fields[name], neutral)]
    messages = fields.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else []):
        if not isinstance(message, dict):
            continue
        names += [f"messages.{number}.{name}" for name in _OF_MESSAGES if not _asks_nothing(message.get(name), ())]
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict) and part.get("type", "text") not in parts:
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


def checked(schema: type[Schema], fields: Any) -> Schema:
    """A body as its schema has it.

    Raises
    ------
    Refusal
        400: it is not right; says what is not.
    """
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise Refusal(400, reason(error), kind(error)) from error


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
    message = said["msg"].removeprefix("Value error, ")
    known = {
        UNSUPPORTED: said["msg"],
        "missing": f"{name} is required",
        "string_type": f"{name} must be a string",
        "model_type": f"{name} must be a JSON object",
    }
    if not path and said["type"] == "value_error":
        return message
    return known.get(said["type"], f"{name}: {message[:1].lower()}{message[1:]}")


def _is_field(part: str) -> bool:
    """Whether a part of an error's place is a field's name, not that of a type that was tried."""
    return part.islower() and part != "str" and "[" not in part


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event on one line, without blanks after the colons (clients match on that), named by its type."""
    name = f"event: {body['type']}\n" if "type" in body else ""
    return name.encode() + b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def timings(done: Completion) -> dict[str, Any]:
    """Counters of one completion under llama.cpp's names, and ours."""
    evaluated = max(0, done.prompt_tokens - done.cached_tokens)
    predicted = done.predicted
    prompt_ms, predicted_ms = 1000 * done.prompt_s, 1000 * done.predict_s
    return {
        "cache_n": done.cached_tokens,
        "prompt_n": evaluated,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / evaluated if evaluated else 0.0,
        "prompt_per_second": 1000 * evaluated / prompt_ms if prompt_ms else 0.0,
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / predicted if predicted else 0.0,
        "predicted_per_second": 1000 * predicted / predicted_ms if predicted_ms else 0.0,
        "draft_n": done.report.nodes,
        "draft_n_accepted": sum(done.report.accepted_by_source.values()),
        "passes": done.report.passes,
        "accepted_by_source": done.report.accepted_by_source,
        "waited_ms": 1000 * done.waited_s,
        "setup_ms": 1000 * done.setup_s,
    }


def generation_settings(request: Common, n_ctx: int, seed: int) -> dict[str, Any]:
    """The settings a completion ran with; the editors' status bars need `n_ctx`."""
    return {
        "n_ctx": n_ctx,
        "n_predict": request.n_predict if request.n_predict is not None else -1,
        "temperature": request.temperature if request.temperature is not None else 0.0,
        "top_k": request.top_k or 0,
        "top_p": request.top_p if request.top_p is not None else 1.0,
        "min_p": request.min_p or 0.0,
        "seed": seed,
        "samplers": request.samplers or [],
        "stop": request.stop or [],
        "n_indent": request.n_indent or 0,
        "t_max_predict_ms": request.t_max_predict_ms or 0,
        "stream": bool(request.stream),
        "speculative": request.speculative is not False,
    }


class _Writer:
    """What answers of all dialects share."""

    def failure(self, error: str) -> dict[str, Any]:
        """The event of a text that failed."""
        return {"error": {"code": 500, "message": error, "type": "server_error"}}


class LlamaAnswer(_Writer):
    """Bodies of one answer of `/infill` or `/completion`; ``prompt`` gives its text, where the client wants it."""

    closing = b""

    def __init__(
        self,
        request: InfillRequest | CompletionRequest,
        *,
        model: str,
        n_ctx: int,
        prompt: Callable[[], str],
        truncated: bool,
        seed: int = 0,
    ) -> None:
        self._seed = seed
        self._request, self._model, self._n_ctx, self._truncated = request, model, n_ctx, truncated
        named = request.response_fields
        self._prompt = prompt() if named is None or "prompt" in named else ""
        self._slot = request.id_slot if request.id_slot is not None else -1

    def whole(self, done: Completion, extra: dict[str, Any], *, streamed: bool = False) -> dict[str, Any]:
        """The answer, or the last event of its stream."""
        body = {
            "index": 0,
            "content": "" if streamed or done.outcome != "done" else self._request.written(done.text),
            "tokens": done.token_ids if self._request.return_tokens and not streamed else [],
            "id_slot": self._slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": done.predicted,
            "tokens_evaluated": done.prompt_tokens,
            "generation_settings": generation_settings(self._request, self._n_ctx, self._seed),
            "prompt": self._prompt,
            "has_new_line": "\n" in done.text,
            "truncated": self._truncated,
            "stop_type": done.stop_type,
            "stopping_word": done.stopping_word,
            "tokens_cached": done.prompt_tokens + max(0, len(done.token_ids) - 1),
            "timings": timings(done),
            **({"superseded": True} if done.outcome == "superseded" else {}),
            **({"deadline": True} if done.deadline_hit else {}),
            **extra,
        }
        return project(body, self._request.response_fields)

    def begin(self, index: int = 0) -> list[dict[str, Any]]:
        """Events before any text."""
        return []

    def delta(self, delta: Delta, index: int = 0) -> list[dict[str, Any]]:
        """Events for what one pass made certain."""
        tokens = list(delta.token_ids) if self._request.return_tokens else []
        return [
            {
                "index": index,
                "content": self._request.written(delta.text),
                "tokens": tokens,
                "stop": False,
                "id_slot": self._slot,
            }
        ]

    def end(self, done: Completion, extra: dict[str, Any], index: int = 0) -> list[dict[str, Any]]:
        """Events at the end of a text."""
        return [self.whole(done, extra, streamed=True)]

    def close(self, finished: Sequence[Completion]) -> list[dict[str, Any]]:
        """Events at the end of a stream."""
        return []


def project(body: dict[str, Any], fields: Sequence[str] | None) -> dict[str, Any]:
    """Only the named fields; a path such as ``timings/prompt_n`` stays the key of its value."""
    if fields is None:
        return body
    out: dict[str, Any] = {}
    for path in fields:
        value: Any = body
        for part in path.split("/"):
            if not isinstance(value, dict) or part not in value:
                break
            value = value[part]
        else:
            out[path] = value
    return out


def finish_reason(done: Completion, *, called: bool = False) -> str:
    """OpenAI's word for why a completion ended, given whether it calls tools."""
    ended = "tool_calls" if called else "stop"
    return ended if done.stop_type in ("eos", "word") else "length"


Kind = Literal["chat.completion", "text_completion", "edit"]
_ID_OF: dict[Kind, str] = {"chat.completion": "chatcmpl", "text_completion": "cmpl", "edit": "edit"}


class Answer(_Writer, ABC):
    """How an answer of one or several texts is written."""

    closing = b""

    @abstractmethod
    def whole(self, finished: Sequence[Completion], extra: dict[str, Any]) -> dict[str, Any]:
        """The answer without streaming."""

    @abstractmethod
    def begin(self, index: int = 0) -> list[dict[str, Any]]:
        """Events before any text."""

    @abstractmethod
    def delta(self, delta: Delta, index: int = 0) -> list[dict[str, Any]]:
        """Events for what one pass made certain."""

    @abstractmethod
    def end(self, done: Completion, extra: dict[str, Any], index: int = 0) -> list[dict[str, Any]]:
        """Events at the end of a text."""

    def close(self, finished: Sequence[Completion]) -> list[dict[str, Any]]:
        """Events at the end of a stream."""
        return []


class OpenAIAnswer(Answer):
    """The bodies of one OpenAI answer, streamed or whole; they share an id.

    Parameters
    ----------
    model
        Name of the model.
    kind
        Chat completions, text completions or edits.
    written
        Gives a text, or a part of one, the line ends of the document.
    predicted
        Tokens of the prediction that came with the request.
    include_usage
        End a stream with an event that carries usage; it has no choices, so clients must have asked for it.
    samples
        Choices for each prompt.
    parser
        Makes what finds calls of tools in a choice, None where there are no tools.
    logprobs
        Writes log-probabilities, where they are asked for.
    echoed
        What stands in front of the texts, by prompt.
    """

    closing = DONE

    def __init__(
        self,
        model: str,
        *,
        kind: Kind = "text_completion",
        predicted: int = 0,
        include_usage: bool = False,
        samples: int = 1,
        written: Callable[[str], str] = str,
        parser: Callable[[], CallParser] | None = None,
        logprobs: LogProbWriter | None = None,
        echoed: Sequence[str] = (),
    ) -> None:
        self.chat = kind == "chat.completion"
        self._predicted, self._include_usage, self._samples = predicted, include_usage, samples
        self._written, self._logprobs = written, logprobs
        self._echoed = [text for text in echoed for _ in range(samples)]
        self._parser: Callable[[], CallParser | None] = parser or (lambda: None)
        self._parsers: dict[int, CallParser | None] = {}
        self._calls, self._lengths = Counter[int](), Counter[int]()  # by choice: calls, characters that were told
        self._head = {
            "id": f"{_ID_OF[kind]}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, finished: Sequence[Completion], extra: dict[str, Any]) -> dict[str, Any]:
        """The answer without streaming."""
        choices = []
        for index, done in enumerate(finished):
            body: dict[str, Any] = {"index": index}
            body["logprobs"] = self._log_probabilities(done.logprobs, index)
            if self.chat:
                body["message"], called = self._message(done.text)
                body["finish_reason"] = finish_reason(done, called=called)
            else:
                body["finish_reason"] = finish_reason(done)
                body["text"] = self._echo(index) + self._written(done.text)
            choices.append(body)
        marks = {"superseded": True} if any(done.outcome == "superseded" for done in finished) else {}
        if any(done.deadline_hit for done in finished):
            marks["deadline"] = True
        return {
            **self._head,
            "choices": choices,
            "usage": usage(finished, self._predicted, self._samples),
            "timings": timings(finished[0]),
            **marks,
            **extra,
        }

    def _message(self, text: str) -> tuple[dict[str, Any], bool]:
        """What the model says, and whether it calls tools."""
        parser, said = self._parser(), list[Said]([text])
        if parser is not None:
            said = [*parser.feed(text), *parser.finish()]
        content = self._written("".join(part for part in said if isinstance(part, str)))
        calls = [self._call(part) for part in said if isinstance(part, ToolCall)]
        message = {"role": "assistant", "content": content, "refusal": None}
        return ({**message, "content": content or None, "tool_calls": calls}, True) if calls else (message, False)

    def _call(self, call: ToolCall) -> dict[str, Any]:
        """A call, with an id of nine letters and digits: templates of Mistral's models take no other."""
        arguments = json.dumps(with_texts(call.arguments, self._written), ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}

    def _echo(self, index: int) -> str:
        return self._echoed[index] if self._echoed else ""

    def _log_probabilities(self, noted: Sequence[TokenLogProb], index: int) -> dict[str, Any] | None:
        """What was noted of further tokens of a choice."""
        if self._logprobs is None:
            return None
        if self.chat:
            return self._logprobs.of_chat(noted)
        body = self._logprobs.of_text(noted, self._lengths[index])
        self._lengths[index] += sum(map(len, body["tokens"]))
        return body

    def _chunk(self, part: dict[str, Any], index: int, **fields: Any) -> dict[str, Any]:
        """One event of a stream."""
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None, **fields}
        choice |= {"delta": part} if self.chat else part
        head = {**self._head, "object": "chat.completion.chunk"} if self.chat else self._head
        return {**head, "choices": [choice]}

    def begin(self, index: int = 0) -> list[dict[str, Any]]:
        """Events before any text."""
        self._parsers[index] = self._parser()
        if self.chat:
            return [self._chunk({"role": "assistant", "content": None if self._parsers[index] else ""}, index)]
        return [self._chunk({"text": self._echo(index)}, index)] if self._echo(index) else []

    def delta(self, delta: Delta, index: int = 0) -> list[dict[str, Any]]:
        """Events for what one pass made certain."""
        parser = self._parsers[index]
        chunks = self._said([delta.text] if parser is None else parser.feed(delta.text), index)
        if self._logprobs is not None and delta.logprobs:
            chunks = chunks or [self._chunk({"content": ""} if self.chat else {"text": ""}, index)]
            chunks[0]["choices"][0]["logprobs"] = self._log_probabilities(delta.logprobs, index)
        return chunks

    def _said(self, said: Sequence[Said], index: int) -> list[dict[str, Any]]:
        """Events for texts and calls: of a call its name first, then its arguments."""
        chunks = []
        for part in said:
            if isinstance(part, ToolCall):
                call = {"index": self._calls[index], **self._call(part)}
                given = {"index": call["index"], "function": {"arguments": call["function"]["arguments"]}}
                call["function"] = {"name": part.name, "arguments": ""}
                chunks += [self._chunk({"tool_calls": [one]}, index) for one in (call, given)]
                self._calls[index] += 1
            elif part:
                chunks.append(self._chunk({"content" if self.chat else "text": self._written(part)}, index))
        return chunks

    def end(self, done: Completion, extra: dict[str, Any], index: int = 0) -> list[dict[str, Any]]:
        """Events at the end of a text: the reason stands on a chunk before ``[DONE]``, where some clients stop."""
        marks = {"deadline": True} if done.deadline_hit else {}
        parser = self._parsers[index]
        rest = [] if parser is None else self._said(parser.finish(), index)
        reason = finish_reason(done, called=self._calls[index] > 0)
        last = self._chunk({} if self.chat else {"text": ""}, index, finish_reason=reason)
        return [*rest, {**last, **marks, **extra}]

    def close(self, finished: Sequence[Completion]) -> list[dict[str, Any]]:
        """Events at the end of a stream."""
        if not (self._include_usage and finished):
            return []
        head = {**self._head, "object": "chat.completion.chunk"} if self.chat else self._head
        counts = usage(finished, self._predicted, self._samples)
        return [{**head, "choices": [], "usage": counts, "timings": timings(finished[0])}]


def usage(finished: Sequence[Completion], predicted: int, samples: int = 1) -> dict[str, Any]:
    """Token counts, each prompt once; of a prediction, what was accepted and what was not."""
    prompt = sum(done.prompt_tokens for done in finished[::samples])
    completion = sum(done.predicted for done in finished)
    accepted = sum(done.report.accepted_by_source.get("prediction", 0) for done in finished) if predicted else 0
    predicted *= len(finished)
    accepted = min(accepted, predicted)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(done.cached_tokens for done in finished[::samples])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(0, predicted - accepted),
        },
    }
