"""Information handlers, which need no model: what is served, tokens, metrics, and forgetting."""

from __future__ import annotations

import asyncio
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from retrieve_spec._version import __version__
from retrieve_spec.config import EDITORS
from retrieve_spec.server import schemas
from retrieve_spec.server.guard import Refusal
from retrieve_spec.server.metrics import Metrics
from retrieve_spec.server.reading import scope_of
from retrieve_spec.server.service import Service

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="5">
<title>retrieve-spec</title>
<style>body{{font:16px sans-serif;margin:2em}}th{{text-align:left;padding-right:2em}}</style>
<h1>retrieve-spec</h1><table>{table}</table>
<h2>Connect an editor</h2><pre>{connect}</pre>
<p>OpenAI clients: the base URL is this address with <code>/v1</code>. What is taken:
<a href="/openapi.json">openapi.json</a>.</html>
"""
_MOST_CHARS = 2 << 20
"""Characters of a text to encode, a few seconds of a core."""


class InformationHandlers:
    """Handlers about one server."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self.service, self.metrics = service, metrics

    async def tokenize(self, body: schemas.TokenizeRequest) -> Response:
        """Text as token ids."""
        codec = self.service.codec
        if len(body.content) > _MOST_CHARS:
            raise Refusal(400, f"{len(body.content)} characters; at most {_MOST_CHARS} are encoded at once")

        def encode() -> list[Any]:
            if body.parse_special:
                ids = codec.encode_prompt(body.content, add_special_tokens=body.add_special)
            else:
                ids = codec.encode(body.content)
            if not body.with_pieces:
                return ids
            return [{"id": i, "piece": piece} for i, piece in zip(ids, codec.pieces(ids), strict=True)]

        return await asyncio.to_thread(lambda: JSONResponse({"tokens": encode()}))

    async def detokenize(self, body: schemas.DetokenizeRequest) -> Response:
        """Token ids as text."""
        if any(i >= self.service.backend_vocabulary for i in body.tokens):
            raise Refusal(400, f"token ids must be below {self.service.backend_vocabulary}")
        return await asyncio.to_thread(lambda: JSONResponse({"content": self.service.codec.decode(body.tokens)}))

    async def template(self, body: schemas.TemplateRequest) -> Response:
        """The prompt of a conversation."""
        ids = await asyncio.to_thread(self.service.prompts.chat, body.messages)
        return JSONResponse({"prompt": self.service.codec.decode(ids)})

    async def models(self) -> Response:
        """The model, and the alias under which Continue sends predictions."""
        service = self.service
        meta = {"n_ctx": service.backend.n_ctx, "n_vocab": service.backend_vocabulary, "fim": self._family()}
        names = [service.name, f"{service.name}-Fast-Apply"]
        data = [{"id": n, "object": "model", "created": 0, "owned_by": "retrieve-spec", "meta": meta} for n in names]
        return JSONResponse({"object": "list", "data": data})

    async def health(self) -> Response:
        """What is served, and what it drafts from."""
        service, workspace = self.service, self.service.workspace
        body: dict[str, Any] = {
            "status": "ok",
            "model": service.name,
            "fim": self._family(),
            "n_ctx": service.backend.n_ctx,
            "queue": service.queue.queue_length,
        }
        if service.fim is None:
            body["fim_missing"] = service.no_fim()
        if workspace is not None:
            body["workspace"] = {
                "indexed": workspace.indexed.is_set() and not (workspace.forgotten or workspace.trouble),
                "files": len(workspace.texts),
                **({} if workspace.indexed.is_set() else {"read": workspace.read[0], "of": workspace.read[1]}),
                "left_out": dict(workspace.left_out),
                **({"forgotten": True} if workspace.forgotten else {}),
            }
            if workspace.trouble:  # nobody needs a key to ask, and what failed may name files
                kind = workspace.trouble.partition(":")[0]
                body["workspace"]["trouble"] = f"{kind}: it is not followed for now; the server's log says more"
        return JSONResponse(body)

    async def props(self) -> Response:
        """Context length and defaults."""
        service = self.service
        settings = {"n_ctx": service.backend.n_ctx, "params": {"n_predict": -1, "temperature": 0.0}}
        body = {
            "default_generation_settings": settings,
            "total_slots": service.config.slots,
            "model_path": service.name,
            "model_alias": service.name,
            "chat_template": getattr(service.tokenizer, "chat_template", None) or "",
            "build_info": f"retrieve-spec {__version__}",
            "fim": self._family(),
        }
        return JSONResponse(body)

    async def kept(self, request: Request) -> Response:
        """What there is to forget of this user."""
        return JSONResponse(await asyncio.to_thread(self.service.kept, scope_of(request)))

    async def forget(self, request: Request) -> Response:
        """Drop everything that is kept of this user, and of the workspace if it is theirs."""
        kept = await asyncio.to_thread(self.service.forget, scope_of(request))
        return JSONResponse({"forgotten": True, "kept": kept})

    async def expose(self) -> Response:
        """Prometheus metrics."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(self, request: Request) -> Response:
        """What runs here, how to connect an editor, and figures so far, for a browser."""
        service = self.service
        url = str(request.base_url).rstrip("/")
        rows = {"Model": service.name, "Fill-in-the-middle": self._family() or "no", "Context": service.backend.n_ctx}
        if service.workspace is not None:
            rows["Files of the workspace"] = len(service.workspace.texts)
        rows |= {name: f"{value:.4g}" for name, value in self.metrics.figures().items()}
        table = "".join(f"<tr><th>{escape(name)}<td>{escape(str(value))}" for name, value in rows.items())
        connect = "\n".join(f"retrieve-spec editor {name} --url {escape(url)}" for name in EDITORS)
        return HTMLResponse(_PAGE.format(table=table, connect=connect))

    def _family(self) -> str | None:
        return self.service.fim.fmt.family if self.service.fim else None
