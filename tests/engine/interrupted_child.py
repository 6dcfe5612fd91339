"""A process that calls an accelerated model again and again until it is told to stop, and says what Ctrl-C did to it.

Run by `test_interruptions.py`: each line that it is given names a call; it says "begun", is sent SIGINT, and answers
with "interrupted" and one line of JSON.
"""

import json
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from batch_rows import left_padded
from transformers import AutoModelForCausalLM

import retrieve_spec as rs

PROMPT = torch.tensor([[301, 72, 15, 280, 44, 301, 72]])
LONG: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 1500, "min_new_tokens": 1500, "seed": 3}
SHORT: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


def calls_of(model: Any) -> dict[str, Callable[[], Any]]:
    """Calls that take many seconds."""
    return {
        "generate": lambda: model.generate(PROMPT, **LONG),
        "batch": lambda: model.generate(**left_padded((12, 3, 7, 9)), **LONG, pad_token_id=0),
        "samples": lambda: model.generate(PROMPT, **LONG, num_return_sequences=6),
        "many": lambda: list(rs.generate_many(model, [PROMPT[0, :length] for length in (2, 4, 7)], **LONG)),
        "stream": lambda: list(rs.generate_stream(model, PROMPT, **LONG)),
    }


def main(recorded_pass: Any, memory: str) -> None:
    folder = Path(rs.__file__).parent / "reference"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain = model.generate(PROMPT, **SHORT)
    rs.accelerate(model, recorded_pass=recorded_pass, rollouts=rs.RolloutMemory(memory, save_every=1))
    assert torch.equal(model.generate(PROMPT, **SHORT), plain)
    others = set(threading.enumerate())  # progress bars leave one of their own
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            print("begun", flush=True)
            calls_of(model)[line.strip()]()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        said = {
            "under_way": len(model.speculation.engine._sequences),
            "threads": [thread.name for thread in threading.enumerate() if thread not in others],
            "same": torch.equal(model.generate(PROMPT, **SHORT), plain),
            "delegated": model.speculation.last.mode == "delegated",
        }
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
    main(sys.argv[1], sys.argv[2])
