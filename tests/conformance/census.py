"""Every architecture of transformers' mappings in, how it is decoded and whether the text is that of `generate` out.

Every entry is built by shrinking its default config; each is decoded plainly and accelerated: greedy, sampled, padded,
over a second turn, under planted drafts that are right and wrong.

python tests/conformance/census.py --mapping causal --part 1/8 --out census.jsonl
python tests/conformance/census.py --only qwen3_5_text,mamba2
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripted_drafter import ScriptedDrafter

import retrieve_spec as rs
from retrieve_spec.verify.shrink import randomise, small_config

MAPPINGS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "image": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
}
NEW = 18
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
EXTRA: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text_config": _AXES},
    "qwen2_5_vl": {"text_config": _AXES},
    "granitemoehybrid": {"layer_types": HYBRID, "num_hidden_layers": 3},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "zamba2": {"mamba_headdim": 16, "n_mamba_heads": 4, "hidden_size": 32, "mamba_expand": 2},
}
"""What a default config needs so that every kind of its layers is there."""


def build(name: str, mapping: str, attention: str | None = None) -> Any:
    """A small random float32 instance of a model type."""
    config = small_config(AutoConfig.for_model(name, **EXTRA.get(name, {})))
    kind = MAPPINGS[mapping][type(config)]
    kind = kind[0] if isinstance(kind, (list, tuple)) else kind
    torch.manual_seed(0)
    options = {"attn_implementation": attention} if attention else {}
    model = kind._from_config(config, dtype=torch.float32, **options).eval()
    randomise(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.use_cache = True
    return model


def prompt(model: Any, length: int, step: int = 37) -> torch.Tensor:
    """(1, length) long, tokens that are special nowhere."""
    vocab = min(int(model.config.get_text_config(decoder=True).vocab_size), 256) - 16
    return torch.tensor([[8 + (i * step + 11) % (vocab - 8) for i in range(length)]])


def compare(model: Any, checks: dict[str, str]) -> None:
    """Decode plainly and accelerated; `checks` takes "same", "differs" or what was raised, by kind of call."""
    ids = prompt(model, 30)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], dim=1)
    shown = torch.tensor([[0] * 5 + [1] * 30])
    calls = {
        "greedy": {"input_ids": ids},
        "short": {"input_ids": prompt(model, 5)},
        "padded": {"input_ids": padded, "attention_mask": shown},
    }
    for name, inputs in calls.items():
        options = {"max_new_tokens": NEW, "do_sample": False}
        try:
            wanted = model.generate(**inputs, **options)
        except Exception as error:
            checks[name] = f"plain raises {type(error).__name__}"
            continue
        for script in ("right", "wrong", "branchy"):
            key = f"{name} {script}"
            try:
                rs.accelerate(model, drafter=ScriptedDrafter(wanted[0], script, vocab=200), nodes=16)
                checks[key] = "same" if torch.equal(model.generate(**inputs, **options), wanted) else "differs"
                if name == "greedy" and script != "wrong":
                    checks[f"tokens per pass {script}"] = f"{model.speculation.last.tokens_per_pass:.2f}"
                if name == "greedy" and script == "branchy":
                    sampled = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "seed": 3}
                    drafted = model.generate(**inputs, **sampled)
                    same = torch.equal(model.generate(**inputs, **sampled, draft="off"), drafted)
                    checks["sampled"] = "same" if same else "differs"
            except Exception as error:
                checks[key] = f"raises {type(error).__name__}: {str(error)[:80]}"
            finally:
                rs.restore(model)
    second_turn(model, ids, checks)


def second_turn(model: Any, ids: torch.Tensor, checks: dict[str, str]) -> None:
    """A cache that is handed back and continued from."""
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    try:
        first = model.generate(ids, **options)
        more = torch.cat([first.sequences, prompt(model, 6, 53)], dim=1)
        wanted = model.generate(more, past_key_values=first.past_key_values, **options).sequences
    except Exception as error:
        checks["second turn"] = f"plain raises {type(error).__name__}"
        return
    try:
        rs.accelerate(model, drafter=ScriptedDrafter(first.sequences[0], "branchy", vocab=200), nodes=16)
        cache = model.generate(ids, **options).past_key_values
        rs.accelerate(model, drafter=ScriptedDrafter(wanted[0], "branchy", vocab=200), nodes=16)
        got = model.generate(more, past_key_values=cache, **options).sequences
        checks["second turn"] = "same" if torch.equal(got, wanted) else "differs"
    except Exception as error:
        checks["second turn"] = f"raises {type(error).__name__}: {str(error)[:80]}"
    finally:
        rs.restore(model)


def examine(name: str, mapping: str) -> dict[str, Any]:
    """One entry's line of the census."""
    began = time.perf_counter()
    line: dict[str, Any] = {"name": name, "mapping": mapping}
    try:
        model = build(name, mapping)
    except Exception as error:
        return {**line, "mode": "not built", "reason": f"{type(error).__name__}: {str(error)[:120]}"}
    checks: dict[str, str] = {}
    try:
        rs.accelerate(model, draft="off")
        interface = model.speculation.interface
        line |= {"class": type(model).__name__, "mode": model.speculation.mode, "reason": model.speculation.reason}
        line["way"] = interface.recurrence.way if interface.recurrence is not None else ""
        rs.restore(model)
        compare(model, checks)
    except Exception as error:
        line |= {"mode": "crash", "reason": f"{type(error).__name__}: {str(error)[:120]}"}
    bad = [key for key, value in checks.items() if value == "differs" or value.startswith("raises")]
    return {**line, "checks": checks, "wrong": bad, "seconds": round(time.perf_counter() - began, 1)}


def names(mapping: str) -> list[str]:
    """Model types of a mapping."""
    return sorted(dict.fromkeys(config.model_type for config in MAPPINGS[mapping]))


def main() -> None:
    """Examine the entries that were asked for, one line of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mapping", choices=list(MAPPINGS), default="causal")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th entry, from the K-th on")
    parser.add_argument("--only", default="", help="model types, separated by commas")
    parser.add_argument("--out", type=Path, help="file that lines are added to")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    part, parts = (int(number) for number in args.part.split("/"))
    chosen = args.only.split(",") if args.only else names(args.mapping)[part - 1 :: parts]
    for name in chosen:
        line = json.dumps(examine(name, args.mapping))
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
