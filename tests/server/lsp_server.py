"""A language server with a scripted model, for tests over standard input and output; arguments: what it says,
"echo" for the line before the cursor; and how many seconds a pass takes."""

import sys
from pathlib import Path

sys.path.extend(map(str, Path(__file__).parents[:2]))

from scripted import ScriptedBackend
from transformers import AutoTokenizer

from retrieve_spec.config import ServeConfig
from retrieve_spec.reference_model import reference_path
from retrieve_spec.server.lsp import create_server, loaded
from retrieve_spec.server.service import Service
from retrieve_spec.server.text import TextCodec
from retrieve_spec.server.workspace import Workspace


def make(roots):
    tokenizer = AutoTokenizer.from_pretrained(str(reference_path()), local_files_only=True)
    codec = TextCodec(tokenizer)
    said = codec.encode(sys.argv[1])

    def echo(prompt):
        before, _, _ = codec.decode(prompt).partition("<|fim_suffix|>")
        return codec.encode(before.rpartition("\n")[2])

    pass_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    backend = ScriptedBackend(lambda prompt: [*(echo(prompt) if sys.argv[1] == "echo" else said), 0], pass_s=pass_s)
    workspace = Workspace(roots, ServeConfig(), tokenizer, lambda store: None) if roots else None
    return Service(backend, tokenizer, "tiny", ServeConfig(), workspace)


create_server(lambda roots: loaded(lambda: make(roots), ServeConfig())).start_io()
