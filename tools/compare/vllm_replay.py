"""Replay of recorded conversations through vLLM's door for proposers: ours beside vLLM's suffix decoding.

::

    python tools/compare/vllm_replay.py TRACES/agent_*.jsonl --tokenizer TOKENIZER.json

A simulated runner gives both what vLLM's gives: every turn of a conversation is a request, whose prompt is all text so
far and whose tokens are the recorded ones; tokens of a draft are accepted as long as they are these. Both may draft as
many tokens. The second half of each file is counted, in three states: `cold` (nothing is known of other requests),
`warm` (the first half was answered before, by the same process), `restarted` (by a process that has ended since). Steps
take no time here, so nothing is left out because it would not pay, and prompts are taken in before the first of them,
however long they are. Ours leaves out tokens whose path is improbable (`min_path_probability`); `filled` are drafts in
which that is next to none. `--tokens` are drafted at most, by both;
`--limit` bounds the conversations of each file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "scripts"))

import harness
import numpy as np
from peers import vllm_suffix
from tokenizers import Tokenizer

from retrieve_spec.bench.traces import Ids, TraceRow, read_trace
from retrieve_spec.integrations import hosted, vllm

STATES = ("cold", "warm", "restarted")
FILLED = 0.005
"""Probability of a path below which `filled` drafts end."""


class Runner:
    """As much of vLLM's model runner as a proposer sees, with one request at a time.

    Parameters
    ----------
    longest
        Tokens of the longest conversation.
    tokens
        Drafted at most.
    """

    def __init__(self, longest: int, tokens: int) -> None:
        self.tokens = tokens
        self.requests: dict[str, Any] = {}
        self.text = np.zeros((1, longest), np.int32)
        self.input_batch = SimpleNamespace(token_ids_cpu=self.text)
        self.answered = 0
        self.end: Callable[[], None] = lambda: None
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
            model_config=SimpleNamespace(max_model_len=longest, get_vocab_size=lambda: 1 << 20),
            parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1, data_parallel_size=1),
        )

    def execute_model(self) -> None:
        """Only there to be seen."""

    def ours(self, options: dict[str, Any]) -> Callable[[list[int]], list[int]]:
        """Our proposer with such options, as a function of the tokens that were just said."""
        self.vllm_config.additional_config = {"retrieve_spec": {"any_version": True, **options}}
        hosted._LONG = self.text.shape[1]  # else beside the engine, whose steps take some time
        proposer = vllm.Proposer(self.vllm_config)
        proposer.drafter.measured = lambda seconds: None  # type: ignore[method-assign]
        self.end = proposer.drafter.save  # as at exit
        return lambda said: proposer.propose([said], self.input_batch.num_tokens_no_spec, self.text)[0]

    def suffix(self, cached: int) -> Callable[[list[int]], list[int]]:
        """vLLM's suffix decoding, which remembers so many answers."""
        proposer = vllm_suffix(self.tokens, cached)
        return lambda said: proposer.propose(self.tokens, self.input_batch, [said])[0]

    def answer(self, prompt: Ids, answer: Ids, propose: Callable[[list[int]], list[int]]) -> int:
        """Passes behind the first token of an answer, drafted for."""
        name = str(self.answered)
        self.answered += 1
        batch, text, begin = self.input_batch, self.text[0], len(prompt)
        text[:begin] = prompt
        text[begin : begin + len(answer)] = answer
        parameters = SimpleNamespace(max_tokens=len(answer), temperature=0.0, extra_args=None)
        state = SimpleNamespace(num_prompt_tokens=begin, sampling_params=parameters, prompt_embeds=None)
        self.requests = {name: state}
        batch.req_ids, batch.req_id_to_index, batch.num_prompt_tokens = [name], {name: 0}, [begin]
        said, at, passes = 1, 1, 0
        while at < len(answer):
            batch.num_tokens_no_spec = np.array([begin + at], np.int32)
            draft = propose(answer[at - said : at].tolist())
            wanted = answer[at : at + len(draft)].tolist()
            right = next((i for i, token in enumerate(wanted) if token != draft[i]), len(wanted))
            said = min(right + 1, len(answer) - at)
            at += said
            passes += 1
        return passes


def turns(rows: Iterable[TraceRow]) -> Iterator[tuple[Ids, Ids]]:
    """Prompt and answer of every turn."""
    for row in rows:
        text = row.prompt
        for ids, generated in row.segments:
            if generated and len(ids) > 1:
                yield text, ids
            text = np.concatenate([text, ids])


def replayed(rows: list[TraceRow], tokens: int, state: str) -> dict[str, float]:
    """Tokens per pass of the second half of the rows, of each method."""
    before, counted = list(turns(rows[: len(rows) // 2])), list(turns(rows[len(rows) // 2 :]))
    longest = max(len(prompt) + len(answer) for prompt, answer in before + counted) + 1
    figures = {"turns": len(counted), "tokens": sum(len(answer) - 1 for _, answer in counted)}
    for method in ("suffix", "ours", "filled"):
        runner = Runner(longest, tokens)
        with tempfile.TemporaryDirectory() as folder:
            cached, options = (0, {}) if state == "cold" else (10_000, {"session": True, "state": folder})
            options |= {"min_path_probability": FILLED} if method == "filled" else {}
            make: Callable[[], Callable[[list[int]], list[int]]]
            make = partial(runner.suffix, cached) if method == "suffix" else partial(runner.ours, options)
            propose = make()
            if state != "cold":
                for turn in before:
                    runner.answer(*turn, propose)
            if state == "restarted":
                runner.end()
                propose = make()
            passes = sum(runner.answer(*turn, propose) for turn in counted)
        figures[method] = figures["tokens"] / passes
    return figures


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Replay every file in every state."""
    tokenizer = Tokenizer.from_file(options.tokenizer)
    files = {}
    for trace, limit in zip_longest(options.traces, options.limit[: len(options.traces)]):
        rows = list(read_trace(trace, tokenizer, limit or None))
        name = Path(trace).stem
        files[name] = {state: replayed(rows, options.tokens, state) for state in STATES}
        print(name, json.dumps(files[name]), file=sys.stderr)
    return {"tokens": options.tokens, "files": files}


def main() -> None:
    """Measure and print."""
    harness.run(measure, __doc__, "traces+", tokenizer=str, tokens=16, limit=[0])


if __name__ == "__main__":
    main()
