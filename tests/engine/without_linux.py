"""Child of test_other_systems.py: what only Linux has is hidden, as on macOS, before the library is imported."""

import builtins
import io
import mmap
import os
import sys
import threading
from pathlib import Path
from typing import Any

OF_MACOS = {"MADV_NORMAL", "MADV_RANDOM", "MADV_SEQUENTIAL", "MADV_WILLNEED", "MADV_DONTNEED", "MADV_FREE"}


def without_proc(original: Any) -> Any:
    def call(path: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(path, str | os.PathLike) and str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(path)
        return original(path, *rest, **options)

    return call


builtins.open = io.open = without_proc(open)
os.listdir, os.stat = without_proc(os.listdir), without_proc(os.stat)
for name in ("sched_getaffinity", "posix_fadvise", "copy_file_range", "sendfile", "O_DIRECT", "memfd_create"):
    delattr(os, name)
for name in {name for name in dir(mmap) if name.startswith("MADV_")} - OF_MACOS:
    delattr(mmap, name)

import torch  # noqa: E402
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: E402

import retrieve_spec  # noqa: E402
from retrieve_spec.datastore.watching import changes  # noqa: E402
from retrieve_spec.reference_model import reference_path  # noqa: E402

folder = Path(sys.argv[1])
texts = folder / "texts"
texts.mkdir()
(texts / "one.py").write_text("def area(width, height):\n    return width * height\n" * 20)
tokenizer = AutoTokenizer.from_pretrained(reference_path())
config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.2, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
torch.manual_seed(0)
model: Any = LlamaForCausalLM(config).eval()
torch.set_num_threads(2)  # passes in threads of our own, as torch's runtime cannot be asked
retrieve_spec.build_datastore(folder / "store", str(texts), tokenizer, workers=1)
prompt = tokenizer("def area(width, height):\n", return_tensors="pt")
plain = model.generate(**prompt, max_new_tokens=24, do_sample=False)
retrieve_spec.accelerate(model, tokenizer=tokenizer, datastores=[folder / "store"], recorded_pass="always")
ours = model.generate(**prompt, max_new_tokens=24, do_sample=False)
assert ours.tolist() == plain.tolist()
report = model.speculation.last
assert report.pass_kind == "recorded" and report.accepted_by_source, report
stop = threading.Event()
assert next(changes([texts], stop)) == set()
stop.set()
