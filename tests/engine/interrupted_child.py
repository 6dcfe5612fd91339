"""A process that calls an accelerated model again and again until it is told to stop, and says what Ctrl-C did to it.

Run by `test_interruptions.py`: each line that it is given names a call; it says "begun", is sent SIGINT, and answers
with one line of JSON.
"""

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import retrieve_spec as rs

PROMPT = torch.tensor([[301, 72, 15, 280, 44, 301, 72]])
LONG: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 1500, "min_new_tokens": 1500, "seed": 3}
SHORT: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


def left_padded() -> dict[str, torch.Tensor]:
    ids = torch.zeros((4, 12), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate((12, 3, 7, 9)):
        ids[row, -length:] = torch.arange(300, 300 + length) + row
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def call(model: Any, kind: str) -> None:
    """One call that takes many seconds."""
    if kind == "generate":
        model.generate(PROMPT, **LONG)
    elif kind == "batch":
        model.generate(**left_padded(), **LONG, pad_token_id=0)
    elif kind == "samples":
        model.generate(PROMPT, **LONG, num_return_sequences=6)
    elif kind == "many":
        list(rs.generate_many(model, [PROMPT[0, :length] for length in (2, 4, 7)], **LONG))
    elif kind == "stream":
        for _ in rs.generate_stream(model, PROMPT, **LONG):
            pass


def main(recorded_pass: Any, memory: str) -> None:
    folder = Path(rs.__file__).parent / "reference"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain = model.generate(PROMPT, **SHORT)
    rollouts = rs.RolloutMemory(memory, save_every=1)
    rs.accelerate(model, recorded_pass=recorded_pass, rollouts=rollouts)
    assert torch.equal(model.generate(PROMPT, **SHORT), plain)
    others = set(threading.enumerate())  # progress bars leave one of their own
    print("ready", flush=True)
    for line in sys.stdin:
        said: dict[str, Any] = {"kind": line.strip(), "interrupted": False}
        try:
            print("begun", flush=True)
            call(model, said["kind"])
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            said["interrupted"] = True
        said["under_way"] = len(model.speculation.engine._sequences)
        said["threads"] = [thread.name for thread in threading.enumerate() if thread not in others]
        said["same"] = torch.equal(model.generate(PROMPT, **SHORT), plain)
        said["last"] = model.speculation.last.mode
        said["torch_threads"] = torch.get_num_threads()
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
    main(sys.argv[1], sys.argv[2])
