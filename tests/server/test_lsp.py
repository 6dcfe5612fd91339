"""The language server, spoken to by pygls' own client."""

import asyncio
import contextlib
import functools
import sys

import lsp_server
import pytest
from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcRequestCancelled
from pygls.lsp.client import LanguageClient
from waiting import HANG_S

from retrieve_spec._version import __version__

URI = "file:///somewhere/a.py"
TEXT = "def add(a, b):\n    é = '🎉'; ret\n"


class Session:
    """A client with an initialised server and one open document; the server is a process, or in a thread."""

    def __init__(self, said, pass_s=0.0, *, text=TEXT, as_process=False):
        self.said, self.pass_s, self.text, self.as_process = said, pass_s, text, as_process

    async def __aenter__(self):
        client = LanguageClient("tests", __version__)
        self.client, self.server = client, contextlib.ExitStack()
        if self.as_process:
            await client.start_io(sys.executable, lsp_server.__file__, self.said)
        else:
            port = self.server.enter_context(lsp_server.in_a_thread(self.said, self.pass_s))
            await client.start_tcp("127.0.0.1", port)
        self.initialised = await client.initialize_async(
            lsp.InitializeParams(capabilities=lsp.ClientCapabilities(), process_id=None)
        )
        client.initialized(lsp.InitializedParams())
        self.open(URI, self.text)
        # Sent while the model is still being loaded: it waits, it is not answered with nothing.
        first = await asyncio.wait_for(self.request(1, 19), HANG_S)
        assert first.items
        return self

    async def __aexit__(self, *_):
        await asyncio.wait_for(self.client.shutdown_async(None), HANG_S)
        self.client.exit(None)
        await asyncio.wait_for(self.client.stop(), HANG_S)
        await asyncio.to_thread(self.server.close)

    def open(self, uri, text):
        self.client.text_document_did_open(lsp.DidOpenTextDocumentParams(lsp.TextDocumentItem(uri, "python", 1, text)))

    def request(self, line, character, *, uri=None, invoked=False, selected=None):
        kind = lsp.InlineCompletionTriggerKind.Invoked if invoked else lsp.InlineCompletionTriggerKind.Automatic
        return self.client.protocol.send_request_async(
            lsp.TEXT_DOCUMENT_INLINE_COMPLETION,
            lsp.InlineCompletionParams(
                lsp.InlineCompletionContext(kind, selected),
                lsp.TextDocumentIdentifier(uri or URI),
                lsp.Position(line, character),
            ),
        )

    async def complete(self, line, character, **options):
        return await asyncio.wait_for(self.request(line, character, **options), HANG_S)

    def change(self, version, text, place=None):
        """Replace the whole document, or put the text at a place."""
        event = lsp.TextDocumentContentChangeWholeDocument(text)
        if place is not None:
            event = lsp.TextDocumentContentChangePartial(lsp.Range(place, place), text)
        document = lsp.VersionedTextDocumentIdentifier(version, URI)
        self.client.text_document_did_change(lsp.DidChangeTextDocumentParams(document, [event]))


def in_a_loop(test):
    """Run an asynchronous test."""

    @functools.wraps(test)
    def run(**fixtures):
        asyncio.run(asyncio.wait_for(test(**fixtures), 400))

    return run


@in_a_loop
async def test_initialise_complete_and_forget():
    async with Session("urn a + b", as_process=True) as s:
        capabilities = s.initialised.capabilities
        assert capabilities.inline_completion_provider
        answer = await s.complete(1, 19)  # UTF-16: the emoji counts two
        (item,) = answer.items
        assert item.insert_text == "urn a + b"
        (command,) = capabilities.execute_command_provider.commands
        await s.client.workspace_execute_command_async(lsp.ExecuteCommandParams(command))
        assert len((await s.complete(1, 19, invoked=True)).items) == 1


@in_a_loop
async def test_documents_may_have_any_address_and_none_is_read_that_the_client_has_not_opened(tmp_path):
    other = tmp_path / "other.py"
    other.write_text("private = 1\nret")
    async with Session("urn a + b") as s:
        assert await s.complete(1, 3, uri=other.as_uri()) is None
        for uri in (other.as_uri(), "file:///a%20b/%C3%BC.py", "file:///c%3A/a.py", "untitled:Untitled-1"):
            s.open(uri, other.read_text())
            assert (await s.complete(1, 3, uri=uri)).items, uri


@in_a_loop
async def test_a_document_keeps_its_line_ends():
    async with Session("urn a\n    x = 1\n", text=TEXT.replace("\n", "\r\n")) as s:
        assert (await s.complete(1, 19)).items[0].insert_text == "urn a\r\n    x = 1\r\n"


@in_a_loop
async def test_only_line_feeds_and_carriage_returns_end_lines():
    """Files of Python's library have form feeds between their parts."""
    async with Session("echo", text="a = '\x0c\u2028\x85'\r\n    b = 1\nc = 2\n") as s:
        for line, text in enumerate(("    b = 1", "c = 2"), 1):
            assert (await s.complete(line, len(text))).items[0].insert_text == text
        s.change(2, " + d", lsp.Position(2, 5))
        assert (await s.complete(2, 9)).items[0].insert_text == "c = 2 + d"


@in_a_loop
async def test_what_the_popup_selected_begins_the_item():
    async with Session("(a, b)") as s:
        span = lsp.Range(lsp.Position(1, 16), lsp.Position(1, 19))
        answer = await s.complete(1, 19, selected=lsp.SelectedCompletionInfo(span, "return"))
        (item,) = answer.items
        assert item.insert_text == "return(a, b)"
        assert item.range == span


@in_a_loop
async def test_a_newer_request_ends_the_older_one_and_a_cancelled_one_is_cancelled():
    async with Session("urn a + b", 0.2) as s:
        older = s.request(1, 18)
        await asyncio.sleep(0.05)
        s.change(2, TEXT.replace("ret\n", "retu\n"))
        newer = s.request(1, 20)
        assert (await asyncio.wait_for(newer, HANG_S)).items
        assert await asyncio.wait_for(older, HANG_S) is None
        future = s.request(1, 19)
        await asyncio.sleep(0.1)
        (identity,) = [i for i, f in s.client.protocol._request_futures.items() if not f.done()]
        s.client.protocol.notify(lsp.CANCEL_REQUEST, lsp.CancelParams(identity))
        with pytest.raises(JsonRpcRequestCancelled):
            await asyncio.wait_for(future, HANG_S)
        assert (await s.complete(1, 18)).items
