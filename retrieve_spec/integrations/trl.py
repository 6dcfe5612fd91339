"""A rollout function for TRL's `GRPOTrainer`: drafted and verified samples, with exact log-probabilities.

`RLOOTrainer` takes no such function (TRL 1.16); its calls of `model.generate` draft once the model is accelerated.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from retrieve_spec.acceleration import accelerate, generate_many
from retrieve_spec.engine.speculation import Speculation
from retrieve_spec.errors import ConfigError
from retrieve_spec.generation.streams import Completion
from retrieve_spec.model_layers import base_model, evaluating


def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    """Sample a completion for every prompt, equal prompts together (`GRPOTrainer(…, rollout_func=rollout_func)`).

    Samples of one prompt read it once and draft from each other; with `accelerate(model, rollouts=RolloutMemory(path))`
    also from the answers of earlier epochs. A model that is not accelerated yet is accelerated with defaults.

    Parameters
    ----------
    prompts
        Texts or conversations, one for each completion, as the trainer hands them out.
    trainer
        A `trl.GRPOTrainer`. Its generation settings are used.

    Returns
    -------
    dict
        By prompt: `prompt_ids` and `completion_ids`, lists of token ids, and `logprobs`, a number for every token of
        the completion, under the distribution it was sampled from (temperature and truncation included).

    Raises
    ------
    ConfigError
        The trainer has tools, or a prompt holds pictures.
    """
    if tools := getattr(trainer, "tools", None):  # the trainer generates later turns itself, from prompts with tools
        raise ConfigError(
            "a trainer without tools for rollout_func, which samples one turn",
            f"tools: {', '.join(getattr(tool, '__name__', repr(tool)) for tool in tools)}",
            "Leave rollout_func out: the trainer's own calls of generate draft for every turn of an accelerated model.",
        )
    from trl.models.utils import unwrap_model_for_generation

    prompt_ids = _encoded(prompts, trainer)
    counts = Counter(map(tuple, prompt_ids))
    requests = [{"inputs": list(ids), "num_return_sequences": count} for ids, count in counts.items()]
    with (
        unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            generation_kwargs=trainer.generation_kwargs,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as model,
        torch.no_grad(),
        evaluating(base_model(model)),
    ):
        if not isinstance(getattr(base_model(model), "speculation", None), Speculation):
            accelerate(model)
        settings = {"generation_config": trainer.generation_config, "return_logprobs": True}
        answers: dict[tuple[int, ...], list[Completion]] = {}
        for ids, done in zip(counts, generate_many(model, requests, **settings), strict=True):
            if done.error is not None:
                raise done.error
            answers[ids] = list(done.outputs)
    rows = [answers[tuple(ids)].pop(0) for ids in prompt_ids]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [row.token_ids.tolist() for row in rows],
        "logprobs": [[] if row.logprobs is None else row.logprobs.tolist() for row in rows],
    }


def _encoded(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """Return token ids of texts, or of conversations by the trainer's chat template."""
    tokenizer = trainer.processing_class
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a multimodal processor
    if all(isinstance(prompt, str) for prompt in prompts):
        ids = tokenizer(text=prompts)["input_ids"]
    else:
        messages = [message for prompt in prompts for message in prompt]
        if not all(isinstance(message.get("content") or "", str) for message in messages):
            raise ConfigError("prompts of text", "messages with other parts", "Leave rollout_func out for pictures.")
        ids = tokenizer.apply_chat_template(
            conversation=prompts,
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **trainer.chat_template_kwargs,
        )["input_ids"]
    return [list(map(int, row)) for row in ids]
