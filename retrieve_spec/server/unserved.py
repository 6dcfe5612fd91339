"""Fields of the dialects that this server does not serve: asked for, they are refused by name, not passed over."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "tools": (),
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
