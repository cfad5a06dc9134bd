"""Vectors of texts, as OpenAI has them."""

from aiohttp import web

from services.gateway import answer_bodies, embedding
from services.gateway.books import Books, Tab
from services.gateway.connections import Connections
from services.gateway.frontend import Frontend
from services.gateway.generation import Generation
from services.gateway.http.call import Call
from services.gateway.http.models import ServedModels
from services.gateway.http.outer import CALLER, ID, SPAN
from services.gateway.metrics import Metrics
from services.gateway.prompts import PromptReader

AT_ONCE = 64
"""How many inputs of a call wait or run at a time. A call may have more inputs than the gateway's
queue takes."""


class Embeddings:
    def __init__(
        self,
        connections: Connections,
        books: Books,
        models: ServedModels,
        prompts: PromptReader,
        frontend: Frontend,
        metrics: Metrics,
    ) -> None:
        self._connections = connections
        self._books = books
        self._models = models
        self._prompts = prompts
        self._frontend = frontend
        self._metrics = metrics

    def calls(self) -> list[Call]:
        return [
            Call(
                "POST",
                "/v1/embeddings",
                self._embed,
                "embed",
                "The vectors of texts",
                answer_bodies.Embeddings,
                body=embedding.EmbeddingBody,
                names_model=True,
                generates=True,
            )
        ]

    async def _embed(self, request: web.Request) -> web.Response:
        asked = embedding.wanted(await self._connections.body(request))
        record = self._models.record(request, asked.model)
        lingo = await self._models.lingo(record)
        size = embedding.size_of(asked, lingo)
        read = await self._prompts.tokens(
            asked.inputs, record, lingo, truncated=asked.truncated, field="input"
        )
        choices = embedding.choices_of(asked, record, lingo, read.prompts, request[ID])
        tokens = sum(map(len, read.prompts))
        generation = Generation(
            self._frontend,
            self._metrics,
            record,
            choices,
            tokens,
            request[SPAN],
            Tab(self._books, request[CALLER]),
            AT_ONCE,
        )
        vectors = [b""] * len(choices)
        async with generation:
            async for deltas in generation.deltas(None):
                for delta in deltas:
                    choice = delta.choice
                    vectors[choice.index] = embedding.written(asked, choice, lingo, size)
                    choice.vector = b""
        data = embedding.answer(vectors, record.name, tokens)
        return web.Response(body=data, content_type="application/json")
