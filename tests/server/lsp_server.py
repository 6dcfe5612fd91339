"""A language server with a scripted model: in a thread for one client on a socket, or, as a program, on standard input
and output."""

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

sys.path.extend(map(str, Path(__file__).parents[:2]))

from scripted import ScriptedBackend
from transformers import AutoTokenizer

from retrieve_spec.config import ServeConfig
from retrieve_spec.reference_model import reference_path
from retrieve_spec.server.lsp import CompletionServer, create_server, loaded
from retrieve_spec.server.service import Service
from retrieve_spec.server.text import TextCodec
from retrieve_spec.server.workspace import Workspace


def scripted(said: str, pass_s: float = 0.0) -> CompletionServer:
    """A server whose model says a text, with "echo" the line before the cursor; a pass takes some seconds."""

    def make(roots):
        tokenizer = AutoTokenizer.from_pretrained(str(reference_path()), local_files_only=True)
        codec = TextCodec(tokenizer)

        def answer(prompt):
            before, _, _ = codec.decode(prompt).partition("<|fim_suffix|>")
            return [*codec.encode(before.rpartition("\n")[2] if said == "echo" else said), 0]

        workspace = Workspace(roots, ServeConfig(), tokenizer, lambda store: None) if roots else None
        return Service(ScriptedBackend(answer, pass_s=pass_s), tokenizer, "tiny", ServeConfig(), workspace)

    return create_server(lambda roots: loaded(lambda: make(roots), ServeConfig()))


@contextlib.contextmanager
def in_a_thread(said: str, pass_s: float = 0.0) -> Iterator[int]:
    """A server that serves the first client of a port until it leaves."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as received, connection.makefile("wb", buffering=0) as sent:
                scripted(said, pass_s).start_io(received, sent)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


if __name__ == "__main__":
    scripted(sys.argv[1]).start_io()
