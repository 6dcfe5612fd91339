"""OpenAI's embeddings: the mean of a text's last hidden states, of length 1."""

from __future__ import annotations

import asyncio
import base64
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from retrieve_spec.server.guard import Refusal
from retrieve_spec.server.schemas import Items, Refusing, Text, TokenId
from retrieve_spec.server.service import Service

_MOST = 256
"""Texts of one request."""
Tokens = Annotated[Items[TokenId], Field(min_length=1)]


class EmbeddingsRequest(Refusing):
    """`POST /v1/embeddings`."""

    model: Any = None
    input: (
        Text
        | Tokens
        | Annotated[Items[Text], Field(min_length=1, max_length=_MOST)]
        | Annotated[Items[Tokens], Field(min_length=1, max_length=_MOST)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    def texts(self) -> list[str | list[int]]:
        """The texts, as they are or in tokens."""
        given: Any = self.input
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given


class EmbeddingHandlers:
    """The handler of the dialect."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def embeddings(self, body: EmbeddingsRequest, request: Request) -> Response:
        """Vectors of texts: of the model's last hidden states the mean over a text's tokens, of length 1."""
        prompts = [await asyncio.to_thread(self._tokens, text) for text in body.texts()]
        data = []
        for index, ids in enumerate(prompts):
            vector = await self._vector(ids, request)
            if body.dimensions not in (None, len(vector)):
                raise Refusal(400, f'"dimensions": the model\'s embeddings have {len(vector)}; leave it out')
            said = base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
            value = said if body.encoding_format == "base64" else vector.tolist()
            data.append({"object": "embedding", "index": index, "embedding": value})
        tokens = sum(map(len, prompts))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": self.service.name, "usage": usage})

    def _tokens(self, text: str | list[int]) -> list[int]:
        """The tokens of a text that the model can read."""
        service = self.service
        ids = service.prompts.encode(text) if isinstance(text, str) else text
        if not ids or max(ids) >= service.backend_vocabulary:
            raise Refusal(400, '"input" has a text without tokens, or a token that is not in the vocabulary')
        if len(ids) > service.backend.n_ctx:
            raise Refusal(
                400, f"a text has {len(ids)} tokens; the model reads {service.backend.n_ctx}", "exceed_context"
            )
        return ids

    async def _vector(self, ids: list[int], request: Request) -> torch.Tensor:
        """The (hidden,) vector of a text, which is read by pieces between the passes of others."""
        service, piece = self.service, self.service.config.prefill_chunk
        cache, total = service.backend.new_cache(), torch.zeros(())
        for at in range(0, len(ids), piece):
            if await request.is_disconnected():
                raise Refusal(499, "the client closed the connection", "cancelled")
            read = service.queue.run_when_idle(partial(service.backend.hidden, cache, ids[at : at + piece]))
            total = total + (await asyncio.wrap_future(read)).sum(0)
        return torch.nn.functional.normalize(total, dim=0)
