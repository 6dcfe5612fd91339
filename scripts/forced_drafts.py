"""Passes of a JSON answer of eight fields with and without drafts of what its schema forces.

python scripts/forced_drafts.py MODEL
"""

from __future__ import annotations

import sys
from typing import Any

import retrieve_spec as rs
from retrieve_spec.engine import joining
from retrieve_spec.reference_model import load_model

FIELDS: dict[str, Any] = {
    **{name: {"type": "string", "maxLength": 30} for name in ("first_name", "last_name")},
    "birth_year": {"type": "integer", "minimum": 1000, "maximum": 2030},
    **{name: {"type": "string", "maxLength": 30} for name in ("home_city", "occupation", "email_address")},
    "is_married": {"type": "boolean"},
    "number_of_children": {"type": "integer", "minimum": 0, "maximum": 20},
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
PROMPTS = (
    "Describe the person in this text as JSON: Ada Byron was born in London in 1815. She wrote about computing, was"
    " married and had three children. Mail: ada@engine.org",
    "Make up a person and describe them as JSON.",
    "Who was Albert Einstein? Answer as JSON.",
)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "T = 0.7, top-p 0.9": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 7},
}


def passes(model: Any, tokenizer: Any, prompt: str, forced: bool, sampling: dict[str, Any]) -> tuple[int, list[int]]:
    """Passes of an answer, and its tokens, with nothing learned before."""
    model.speculation.forget()
    message = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    held = rs.GrammarProcessor.of(tokenizer, json_schema=SCHEMA)
    guide_of = joining.guide_of
    if not forced:
        joining.guide_of = lambda processors: None  # the same masks, and nobody asks what they leave
    try:
        text = model.generate(**inputs, **sampling, logits_processor=[held], max_new_tokens=250)
    finally:
        joining.guide_of = guide_of
    return model.speculation.last.passes, text[0].tolist()


def main() -> None:
    """Print passes by prompt and sampling."""
    model, tokenizer = load_model(sys.argv[1])
    rs.accelerate(model, tokenizer)
    for name, sampling in SAMPLING.items():
        answers = [[passes(model, tokenizer, prompt, on, sampling) for on in (True, False)] for prompt in PROMPTS]
        same = all(with_[1] == without[1] for with_, without in answers)
        with_, without = (sum(pair[i][0] for pair in answers) for i in (0, 1))
        print(f"{name}: {with_} passes with, {without} without ({without / with_:.2f} ×), same text: {same}")


if __name__ == "__main__":
    main()
