"""Requests as clients send them.

Fields are optional unless their dialect requires them; unknown fields are ignored. Unsupported fields are refused by
name if ignoring them would change the answer's meaning; others are ignored and reported.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import PydanticCustomError
from transformers import PreTrainedTokenizerBase

from retrieve_spec.server.guard import UNSUPPORTED
from retrieve_spec.server.history import chat_tools, chat_turns, only, read_choice, read_content
from retrieve_spec.server.sampling import SAMPLER_LETTERS, SamplerName
from retrieve_spec.server.text import line_end, with_line_feeds
from retrieve_spec.server.tools import referenced

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list that is validated up to its first wrong item; thousands of errors would take a fifth of a second."""

Item = Annotated[Any, WithJsonSchema({"type": "object"})]
"""Parts of a history, which are never refused."""
Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e9, le=1e9)]
Count = Annotated[int, Field(ge=-1), AfterValidator(partial(min, 1 << 31))]
"""Number of tokens; -1 means as many as fit."""
_SEEDS = (1 << 63) - 1
Seed = Annotated[int, AfterValidator(lambda seed: seed % _SEEDS if seed >= 0 else -1)]
"""A number of any size; negative means none."""
Share = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1)]
Penalty = Annotated[float, Field(allow_inf_nan=False, ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(allow_inf_nan=False, gt=0, le=100)]
Bias = Annotated[float, Field(allow_inf_nan=False, ge=-100, le=100)]
TopTokens = Annotated[StrictInt, Field(ge=0, le=20)]
Text = StrictStr
FunctionName = Annotated[str, Field(pattern=r"^[\w.:/ -]{1,128}$")]
TokenId = Annotated[StrictInt, Field(ge=0, le=1 << 31)]
_NEVER = -100.0
"""A bias with which a token is not chosen, as OpenAI describes it."""
BiasedId = Annotated[int, Field(ge=0, le=1 << 31)]
"""A token id as the name of a field in JSON, a string."""
_MOST_PROMPTS = 16


def _names_what_a_prompt_is(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(given)
    except ValidationError:
        expected = {"most": _MOST_PROMPTS}
        raise PydanticCustomError(
            "prompt", "expected a text, or token ids as whole numbers, or a list of 1 to {most} of these", expected
        ) from None


Prompt = Text | Items[TokenId]
"""A text, or its token ids."""
Prompts = Annotated[
    Prompt | Annotated[Items[Prompt], Field(min_length=1, max_length=_MOST_PROMPTS)],
    WrapValidator(_names_what_a_prompt_is),
]
"""A prompt, or several."""
Stops = Annotated[Items[Text], Field(max_length=256)] | Text | None


class Lenient(BaseModel):
    """Ignores unknown fields."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class Asked(Lenient):
    """A request that selects a model."""

    model: Any = None


class Prediction(Lenient):
    """The expected text (OpenAI's predicted outputs), as a string or parts."""

    content: Any = None

    def as_text(self) -> str:
        """Return it as a string."""
        return read_content(self.content, "prediction", [])[0]


class Refusing(Asked):
    """A request whose unsupported fields are refused by name if ignoring them would change the answer's meaning."""

    _refused: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Further unsupported fields of a dialect, with the values that have no effect."""
    _asks: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """The same for fields that are ignored."""
    _left_out: list[str] = PrivateAttr(default_factory=list)

    @property
    def left_out(self) -> list[str]:
        """Names of the fields that are ignored."""
        return self._left_out

    @model_validator(mode="wrap")
    @classmethod
    def _is_served(cls, fields: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(fields, dict):
            return check(fields)
        names = unserved(fields, {*cls.model_fields, *cls._asks}, cls._refused)
        if names:
            given = {"names": ", ".join(names)}
            raise PydanticCustomError(UNSUPPORTED, "not served here: {names}; leave it out", given)
        left_out = [name for name, neutral in cls._asks.items() if not _asks_nothing(fields.get(name), neutral)]
        request = check(cls._translated(fields, left_out))
        request._left_out = left_out
        return request

    @classmethod
    def _translated(cls, fields: dict[str, Any], left_out: list[str]) -> dict[str, Any]:
        """Return a request's fields as its schema has them; add the names of ignored ones to the list."""
        return fields


class Speculating(Refusing):
    """Fields of this server that every dialect accepts."""

    prediction: Prediction | None = None
    speculative: StrictBool | None = Field(None, description="False decodes plainly; the text is the same.")
    deadline_ms: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None

    def own_fields(self) -> dict[str, Any]:
        """Return these fields, for a translation."""
        return self.model_dump(include=set(Speculating.model_fields) - set(Refusing.model_fields))


class SamplingOptions(Lenient):
    """Sampling and stop rules."""

    temperature: Number | None = None
    top_k: Count | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    stop: Stops = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repeat_penalty: RepetitionPenalty | None = Field(
        None, description="llama.cpp's: counts the last `repeat_last_n` tokens; without effect beside the other."
    )
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = Field(None, description="64 by default; -1 means all.")
    logit_bias: Annotated[dict[BiasedId, Bias], Field(max_length=1024)] | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _by_token(cls, given: Any) -> Any:
        """Return biases by token; llama.cpp's are pairs, in which false stands for never."""
        if isinstance(given, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in given):
            given = {token: _NEVER if bias is False else bias for token, bias in given}
        return given or None


class Translated(SamplingOptions, Speculating):
    """Fields of chats that the dialects which are translated to them accept as well."""

    chat_template_kwargs: dict[str, Any] | None = None

    def own_fields(self) -> dict[str, Any]:
        """Return these fields, where they are given."""
        own = set(Translated.model_fields) - set(Refusing.model_fields)
        return self.model_dump(include=own, exclude_none=True)


class Common(SamplingOptions, Speculating):
    """Fields of every request for text.

    After validation all its texts have LF as line ends, whatever the document has.
    """

    _asks = {"chat_template_kwargs": ()}

    _newline: str = PrivateAttr("\n")

    stream: StrictBool | None = None
    samplers: Items[SamplerName] | None = None
    n_predict: Count | None = None
    max_tokens: Count | None = None
    n_indent: Annotated[int, Field(ge=0, le=10_000)] | None = None
    t_max_predict_ms: Number | None = None
    cache_prompt: StrictBool | None = None
    id_slot: int | None = Field(None, ge=-1, le=1 << 20)
    response_fields: Items[Text] | None = None
    return_tokens: StrictBool | None = None
    user: Any = None

    @field_validator("samplers", mode="before")
    @classmethod
    def _by_letter(cls, given: Any) -> Any:
        """Return the names of samplers; llama.cpp also takes a text with a letter for each."""
        return [SAMPLER_LETTERS.get(letter, letter) for letter in given] if isinstance(given, str) else given

    def written(self, text: str) -> str:
        """Return a text, or a part of one, with the document's line ends."""
        return text if self._newline == "\n" else text.replace("\r", "").replace("\n", self._newline)

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, fields: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(fields, dict):
            return check(fields)
        request = check(with_line_feeds(fields))
        request._newline = cls._line_end(fields)
        return request

    @classmethod
    def _line_end(cls, fields: dict[str, Any]) -> str:
        """Return the line end of the document."""
        return line_end(*_texts([fields.get(name) for name in ("input_prefix", "prompt", "input_suffix", "suffix")]))

    def wanted_json(self) -> tuple[dict[str, Any] | None, str]:
        """Return the JSON schema of the answer (None for any text), and the field that asks for it."""
        return None, ""

    def wanted_pattern(self) -> str | None:
        """Return the regular expression of the answer, None for any text."""
        return None

    def wanted_logprobs(self) -> int | None:
        """Return how many of the most probable tokens to list with each token; None for no log-probabilities."""
        return None


class ExtraChunk(Lenient):
    """An excerpt of another file (`input_extra`); `time` has several formats and is not read."""

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

    prompt: Prompts
    json_schema: dict[str, Any] | None = None

    def wanted_json(self) -> tuple[dict[str, Any] | None, str]:
        """Return the JSON schema of the answer; an empty one has no effect."""
        return self.json_schema or None, "json_schema"


class StreamOptions(Lenient):
    """What a stream contains besides text."""

    include_usage: StrictBool | None = None


class NamedSchema(Lenient):
    """A JSON schema with its name."""

    name: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Lenient):
    """Format of an answer: any text, a JSON object, or JSON under a schema (llama.cpp has it beside the type)."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and not (self.schema_ or (self.json_schema and self.json_schema.schema_)):
            raise ValueError("json_schema.schema is required")
        return self


def _json_of(given: Any) -> Any:
    """Return the value of a JSON text, which vLLM takes for a schema."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None


Schema = Annotated[dict[str, Any], BeforeValidator(_json_of)]
Choices = Annotated[Items[Text], Field(min_length=1, max_length=1024)]


class StructuredOutputs(Refusing):
    """vLLM's: what the answer is held to."""

    _refused = {"grammar": (), "structural_tag": ()}

    json_: Schema | None = Field(None, alias="json")
    json_object: StrictBool | None = None
    regex: Text | None = None
    choice: Choices | None = None


_GUIDED = ("guided_json", "guided_regex", "guided_choice")


class OpenAIOptions(Common):
    """Fields of both OpenAI dialects."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = Field(None, description="vLLM's older names of parts of `structured_outputs`.")
    guided_regex: Text | None = None
    guided_choice: Choices | None = None

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    return_tokens_as_token_ids: StrictBool | None = Field(
        None, description="Calls tokens with log-probabilities `token_id:1` in place of their texts, as vLLM does."
    )

    @field_validator("response_format", "structured_outputs", *_GUIDED, mode="before")
    @classmethod
    def _any_text_if_empty(cls, given: Any) -> Any:
        return given or None

    def wanted_json(self) -> tuple[dict[str, Any] | None, str]:
        """Return the JSON schema of the answer (None for any text), and the field that asks for it."""
        outputs = self._held_to
        if outputs.json_ is not None or outputs.json_object:
            return outputs.json_ or {"type": "object"}, "structured_outputs"
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None, ""
        given = wanted.json_schema.schema_ if wanted.json_schema else wanted.schema_
        return given or {"type": "object"}, "response_format"

    @property
    def _held_to(self) -> StructuredOutputs:
        older = {"json": self.guided_json, "regex": self.guided_regex, "choice": self.guided_choice}
        return self.structured_outputs or StructuredOutputs.model_validate(older)

    def wanted_pattern(self) -> str | None:
        """Return the regular expression of the answer, None for any text."""
        outputs = self._held_to
        return "|".join(map(re.escape, outputs.choice)) if outputs.choice else outputs.regex or None


class OpenAICompletionRequest(OpenAIOptions):
    """`POST /v1/completions`."""

    prompt: Prompts | None = None
    suffix: Text | None = None
    logprobs: StrictBool | TopTokens | None = None
    echo: StrictBool | None = None

    def wanted_logprobs(self) -> int | None:
        """Return how many of the most probable tokens to list with each token; None for no log-probabilities."""
        return None if self.logprobs is None or self.logprobs is False else int(self.logprobs)

    @model_validator(mode="after")
    def _echoes_what_it_knows(self) -> Self:
        if self.echo and self.wanted_logprobs() is not None:
            raise ValueError("echo with logprobs: those of the prompt are not served")
        return self


class _Whole(BaseModel):
    """Passed to chat templates with all fields that a client sends."""

    model_config = ConfigDict(extra="allow")


def of_arguments(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of arguments, with a reference at its top resolved (Pydantic's recursive models have one)."""
    others = dict(parameters)
    definition = referenced(str(others.pop("$ref", "")), others)
    return {**others, **definition} if isinstance(definition, dict) else parameters


def _with_lower_types(schema: Any) -> Any:
    """Return a JSON schema with the types in lower case; Gemini's clients send OBJECT and STRING."""
    if isinstance(schema, list):
        return [_with_lower_types(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    lower = {"type": schema["type"].lower()} if isinstance(schema.get("type"), str) else {}
    return {key: _with_lower_types(value) for key, value in schema.items()} | lower


class Function(_Whole):
    """A function that the model may call: name, description, JSON schema of the arguments."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None

    @field_validator("parameters", mode="before")
    @classmethod
    def _without_what_says_nothing(cls, given: Any) -> Any:
        """Drop null and empty fields, which Go and PHP send for unset ones."""
        if isinstance(given, dict):
            given = _with_lower_types(given) if given.get("type") == "OBJECT" else given
            unset = {"type": "", "properties": [], "required": {}}
            return {key: value for key, value in given.items() if value is not None and value != unset.get(key)}
        return None if given in ([], True) else given

    @field_validator("parameters")
    @classmethod
    def _describe_an_object(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """Raise an error unless this is a JSON schema of arguments."""
        schema = of_arguments(given or {})
        kinds = schema.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise ValueError('expected the "type" "object": arguments have names')
        if not (isinstance(schema.get("properties", {}), dict) and isinstance(schema.get("required", []), list)):
            raise ValueError('expected "properties" by name, and a list of those that are "required"')
        return given


class Tool(_Whole):
    """A tool; only functions are offered."""

    type: Literal["function"]
    function: Function


def is_tool(fields: Mapping[str, Any]) -> bool:
    """Whether it is a function that can be offered."""
    try:
        Tool.model_validate(fields)
    except ValidationError:
        return False
    return True


class Conversation(Refusing):
    """Messages, tools and options of the prompt."""

    messages: Annotated[Items[dict[str, Any]], Field(min_length=1)]
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Text | None = None
    enable_thinking: StrictBool | None = Field(None, description="Whether the chat template is to let the model think.")
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = Field(
        None, description="Go on with the last message; if it is an assistant's, unless this is false."
    )

    @classmethod
    def _translated(cls, fields: dict[str, Any], left_out: list[str]) -> dict[str, Any]:
        messages, tools = fields.get("messages"), fields.get("tools")
        fields = {
            **fields,
            **_thinking_wanted(fields),
            "tool_choice": (choice := read_choice(fields.get("tool_choice"))),
        }
        if isinstance(messages, list) and messages:
            fields = {**fields, "messages": chat_turns(messages, left_out)}
        if isinstance(tools, list):
            fields = {**fields, "tools": chat_tools(tools, left_out)}
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            allowed = choice["allowed_tools"] if isinstance(choice.get("allowed_tools"), dict) else choice
            fields = {**fields, "tools": only(fields.get("tools"), allowed), "tool_choice": allowed.get("mode", "auto")}
        return super()._translated(fields, left_out)

    _in_messages: frozenset[str] = frozenset()

    def leave_to_messages(self, names: Collection[str]) -> None:
        """Keep from the chat template the functions that the messages describe."""
        self._in_messages = frozenset(names)

    @property
    def offered(self) -> dict[str, Tool]:
        """Functions that may be called, by name."""
        return {} if self.tool_choice == "none" else {tool.function.name: tool for tool in self.tools or ()}

    @property
    def argument_schemas(self) -> dict[str, dict[str, Any]]:
        """JSON schemas of the arguments of functions that may be called, by name."""
        return {name: of_arguments(tool.function.parameters or {}) for name, tool in self.offered.items()}

    @property
    def named(self) -> str | None:
        """Name of the one function that must be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Functions that the chat template describes, in the form that it reads."""
        described = [tool for name, tool in self.offered.items() if name not in self._in_messages]
        return [tool.model_dump(exclude_unset=True) for tool in described]

    def rendering(self) -> dict[str, Any]:
        """Return arguments of `apply_chat_template`: the template's own variables, and how the prompt ends."""
        last, begins = self.messages[-1], self.add_generation_prompt
        begun = last["role"] == "assistant" and not ("tool_calls" in last or begins)
        goes_on = begun if self.continue_final_message is None else self.continue_final_message
        return {
            **self._thinking(),
            **(self.chat_template_kwargs or {}),
            "add_generation_prompt": begins is not False and not goes_on,
            "continue_final_message": goes_on,
        }

    def _thinking(self) -> dict[str, Any]:
        """Return the variables that tell chat templates whether, and how much, to think."""
        effort, thinks = self.reasoning_effort, self.enable_thinking
        if thinks is None and effort is not None:
            thinks = effort != "none"
        told = {} if effort is None else {"reasoning_effort": effort}
        return told if thinks is None else {**told, "enable_thinking": thinks, "thinking": thinks}

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        names, last = [tool.function.name for tool in self.tools or ()], self.messages[-1]
        called = "tool_calls" in last
        if (self.tool_choice == "required" and not names) or self.named not in (None, *names):
            raise ValueError("tool_choice: there is no such tool among tools")
        if self.continue_final_message and (last["role"] != "assistant" or called or self.add_generation_prompt):
            raise ValueError(
                "continue_final_message: the last message is to be an assistant's, without tool_calls, and"
                " add_generation_prompt left out"
            )
        if taken := _ARGUMENTS & (self.chat_template_kwargs or {}).keys():
            raise ValueError(f"chat_template_kwargs: {min(taken)} is no variable of a template's own")
        return self


def _thinking_wanted(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields about thinking, from the objects in which OpenRouter's and other clients send them."""
    reasoning, thinking = fields.get("reasoning"), fields.get("thinking")
    wanted: dict[str, Any] = {}
    if isinstance(reasoning, dict) and isinstance(reasoning.get("effort"), str):
        wanted["reasoning_effort"] = reasoning["effort"]
    if isinstance(reasoning, dict) and isinstance(reasoning.get("enabled"), bool):
        wanted["enable_thinking"] = reasoning["enabled"]
    if isinstance(thinking, dict) and isinstance(thinking.get("type"), str):
        wanted["enable_thinking"] = thinking["type"] != "disabled"
    return {name: value for name, value in wanted.items() if fields.get(name) is None}


class ChatRequest(Conversation, OpenAIOptions):
    """`POST /v1/chat/completions`."""

    _asks = {"web_search_options": ()}

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
        """Return how many of the most probable tokens to list with each token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _asks_for_one_thing(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs: true")
        return self


class TemplateRequest(Conversation):
    """`POST /apply-template`."""


class TokenizeRequest(Asked):
    """`POST /tokenize`: llama.cpp's `content`, or vLLM's `prompt` or `messages`."""

    content: Text
    add_special: StrictBool = False
    parse_special: StrictBool = True
    with_pieces: StrictBool = False
    conversation: TemplateRequest | None = Field(None, description="What is tokenized instead, as vLLM's `messages`.")
    return_token_strs: StrictBool | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_vllm(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or "content" in fields:
            return fields
        if "messages" in fields:
            return {**fields, "content": "", "conversation": fields}
        if "prompt" in fields:
            return {**fields, "content": fields["prompt"], "add_special": fields.get("add_special_tokens", True)}
        return fields


class DetokenizeRequest(Asked):
    """`POST /detokenize`."""

    tokens: Items[TokenId]


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
    # what this server had once
    "provenance": (False,),
}
"""Values with which a field has no effect; None, "", [] and {} never have one."""


_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def unserved(fields: Mapping[str, Any], served: Collection[str], also: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return the names of unsupported fields that would have an effect.

    ``served`` are the fields of the dialect that are supported or only ignored, ``also`` further unsupported ones.
    """
    kept = {name: neutral for name, neutral in _NEUTRAL.items() if name not in served}
    kept.update(also)
    return [name for name in kept if name in fields and not _asks_nothing(fields[name], kept[name])]


def _asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    if value is None or value in ("", [], {}):
        return True
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)
