"""A language server with a scripted model, for tests over standard input and output; argument: what it says,
"echo" for the line before the cursor."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

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

    class Slow(ScriptedBackend):
        def _pass(self):
            if len(sys.argv) > 2:
                import time

                time.sleep(float(sys.argv[2]))
            super()._pass()

    def echo(prompt):
        before, _, _ = codec.decode(prompt).partition("<|fim_suffix|>")
        return codec.encode(before.rpartition("\n")[2])

    backend = Slow(lambda prompt: [*(echo(prompt) if sys.argv[1] == "echo" else said), 0])
    workspace = Workspace(roots, ServeConfig(), tokenizer, lambda store: None) if roots else None
    return Service(backend, tokenizer, "tiny", ServeConfig(), workspace)


create_server(lambda roots: loaded(lambda: make(roots), ServeConfig())).start_io()
