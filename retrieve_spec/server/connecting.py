"""Connection of a language server to a server that editors share: waited for while an editor starts up, or given up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from retrieve_spec.errors import ServeError
from retrieve_spec.server.lsp import create_server
from retrieve_spec.server.remote import Remote, RemoteCompleter, starter


class Connecting:
    """The remote completer of a language server, which may be given up while it is waited for.

    ``arguments`` are of ``retrieve-spec serve``, for one that is started; the editor's folders come with them.
    """

    def __init__(self, remote: Remote, arguments: Sequence[str]) -> None:
        self._remote, self._arguments = remote, arguments
        self._lock = threading.Lock()
        self._completer: RemoteCompleter | None = None
        self._closed = False

    def make(self, roots: Sequence[Path]) -> RemoteCompleter:
        """Wait for the server, which drafts from these folders if it has to be started.

        Raises
        ------
        ServeError
            There is none, or it was given up.
        """
        folders = [part for root in roots for part in ("--workspace", str(root))]
        with self._lock:
            if self._closed:
                raise ServeError(f"to reach {self._remote.url}", "the editor has closed it", "Open the editor again.")
            start = starter(self._remote, [*self._arguments, *folders])
            completer = self._completer = RemoteCompleter(self._remote, start)
        if not completer.wait():
            remedy = "Check --connect, --model and its key."
            raise ServeError(f"to reach {self._remote.url}", completer.trouble or "nobody answers", remedy)
        return completer

    def close(self) -> None:
        """Let go of the server, or wait for it no longer; from any thread."""
        with self._lock:
            self._closed = True
            if self._completer is not None:
                self._completer.close()


def connect_stdio(remote: Remote, arguments: Sequence[str], workspaces: Sequence[Path] = ()) -> None:
    """Serve on standard input and output by asking a server elsewhere, which is started if it is not there.

    Arguments are those of `Connecting`; `workspaces`: folders to draft from besides the editor's.
    """
    connecting = Connecting(remote, arguments)
    server = create_server(connecting.make, workspaces)
    server.give_up = connecting.close
    server.start_io()
