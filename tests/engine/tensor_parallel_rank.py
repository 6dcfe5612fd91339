"""One rank of a tensor-parallel model, started by `test_tensor_parallel`: generates and writes down what it got."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import retrieve_spec as rs
from retrieve_spec.drafting.drafter import Budget
from retrieve_spec.engine.budget import CostModel
from retrieve_spec.errors import RankError
from retrieve_spec.kernels import sampling  # noqa: F401  (compiled before ranks wait for each other)


class RandomStop:
    """Ends a text when a die says so, which every rank throws for itself."""

    def __init__(self, rank: int) -> None:
        self.random = torch.Generator().manual_seed(rank + 1)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        return bool(torch.rand((), generator=self.random) < 0.1)


def main(folder: Path, rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", tp_plan="auto").eval()
    prompt = torch.tensor([[3 + (i * 37 + 11) % 190 for i in range(12)] * 3])
    said: dict[str, Any] = {"plain": model.generate(prompt, max_new_tokens=24, do_sample=False).tolist()}

    rs.accelerate(model)
    costs = CostModel.seconds

    def slower_on_one_rank(self: CostModel, context: int, nodes: int) -> Any:  # as by its own clock
        time.sleep(0.002 * rank)
        return costs(self, context, nodes) * (1 + 0.2 * rank * np.arange(nodes + 1, dtype=np.float32))

    CostModel.seconds = slower_on_one_rank
    said["greedy"] = [model.generate(prompt, max_new_tokens=24, do_sample=False).tolist() for _ in range(2)]
    last = model.speculation.last
    said["mode"], said["fewer passes"] = last.mode, last.passes < last.new_tokens
    torch.manual_seed(rank)  # each rank draws its own seed
    said["sampled"] = model.generate(prompt, max_new_tokens=24, do_sample=True).tolist()
    said["stopped"] = [
        model.generate(prompt, max_new_tokens=40, do_sample=False, stopping_criteria=[RandomStop(rank)]).tolist()
        for _ in range(2)
    ]
    said["streamed"] = [
        token for piece in rs.generate_stream(model, prompt, max_new_tokens=20) for token in piece.token_ids.tolist()
    ]
    two = torch.cat([prompt, prompt.roll(5, dims=1)])
    said["batch"] = model.generate(two, max_new_tokens=20, do_sample=False).tolist()

    propose = type(model.speculation.drafter()).propose

    def fail(self: Any, budget: Budget) -> Any:
        raise OSError("a file of the first rank is gone")

    type(model.speculation.drafter()).propose = fail
    try:
        model.generate(prompt, max_new_tokens=9, do_sample=False)
    except (OSError, RankError) as error:
        said["error"] = type(error).__name__
    type(model.speculation.drafter()).propose = propose
    said["after"] = model.generate(prompt, max_new_tokens=24, do_sample=False).tolist()
    return said


if __name__ == "__main__":
    place = Path(sys.argv[1])
    said = main(place, int(os.environ["RANK"]))
    (place / f"rank{os.environ['RANK']}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()
