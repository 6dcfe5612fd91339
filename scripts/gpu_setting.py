"""Setting of the GPU check's sections: where they run, trees, passes, timing."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.recorded.cuda.pass_pool import PassPool
from retrieve_spec.recorded.recorded_pass import RecordedPass
from retrieve_spec.recorded.recording import Recording
from retrieve_spec.verify.probe import check_verifier
from retrieve_spec.verify.verifier import Verifier, VerifierInputs

Attempt = Callable[[str, Callable[[], Any]], Any]
ROOT, NOTHING = np.array([5], np.int32), np.empty(0, np.int32)


class Setting:
    """Where sections run and how much they do."""

    def __init__(self, options: Namespace) -> None:
        self.device: str = options.device
        self.dry: bool = options.dry_run
        self.context: list[int] = sorted(options.context)
        self.nodes: list[int] = options.nodes
        self.trace: str | None = options.trace
        self.repeats = 2 if self.dry else 15
        self.new_tokens = 24 if self.dry else 160

    @property
    def on_gpu(self) -> bool:
        """Whether there is a device to wait for."""
        return self.device.startswith("cuda")

    def wait(self) -> None:
        """Let the device finish."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def clock(self) -> float:
        """Seconds, when the device has finished."""
        self.wait()
        return time.perf_counter()

    def median_ms(self, run: Callable[[], Any], warm_up: int = 3) -> float:
        """Median milliseconds of a call."""
        times = []
        for repeat in range(self.repeats + warm_up):
            began = self.clock()
            run()
            if repeat >= warm_up:
                times.append((self.clock() - began) * 1e3)
        return round(statistics.median(times), 4)

    def pool(self, recorded: RecordedPass) -> PassPool:
        """Graphs; on a CPU a plain call stands in for each."""
        return PassPool(recorded) if self.on_gpu else PassPool(recorded, lambda run: (run(), run)[1], triton=False)

    def graph_maker(self, recording: Recording) -> Callable[[], Verifier]:
        """What makes verifiers that replay graphs; raises when their passes are not the model's."""
        made = replace(recording, pool=self.pool(recording.recorded))
        if problem := check_verifier(made.model, made()):
            raise RuntimeError(problem)
        return made


def draft(nodes: int) -> DraftTree:
    """A tree of exactly `nodes` nodes: a main branch of half of them and short side branches."""
    main = list(range(20, 20 + (nodes + 1) // 2))
    return DraftTree.from_paths([main, *[[500 - i] for i in range(nodes - len(main))]] if nodes else [])


def prompt_of(length: int, device: Any, vocab: int = 500) -> torch.Tensor:
    """(1, length) token ids that do not repeat soon."""
    return torch.as_tensor((np.arange(length) * 7919 + 13) % vocab, device=device)[None]


def plain_pass(model: Any, prompt: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A one-token pass behind a prompt, with the arguments that plain `generate` gives it; returns its logits."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token, device = prompt[:, :1], prompt.device

    def run() -> torch.Tensor:
        length = cache.get_seq_length()
        mask = torch.ones((1, length + 1), dtype=torch.long, device=device)
        at = {"attention_mask": mask, "position_ids": torch.tensor([[length]], device=device)}
        logits: torch.Tensor = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1, **at).logits
        return logits[0]

    return run


def started(verifier: Verifier, model: Any, prompt: torch.Tensor, room: int) -> Verifier:
    """A verifier that has read a prompt and has room for so many tokens behind it."""
    length = prompt.shape[1]
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    kwargs = {"past_key_values": cache, "position_ids": torch.arange(length, device=prompt.device)[None]}
    verifier.start(VerifierInputs(prompt, kwargs, max_length=length + room))
    verifier.forward(prompt[0].cpu().numpy().astype(np.int32))
    verifier.commit(NOTHING)
    return verifier


def tree_pass(verifier: Verifier, tree: DraftTree) -> Callable[[], torch.Tensor]:
    """A pass over the root and a tree of which nothing is accepted: the text grows by the root."""

    def run() -> torch.Tensor:
        logits = verifier.forward(ROOT, tree if len(tree) else None).logits
        verifier.commit(NOTHING)
        return logits

    return run
