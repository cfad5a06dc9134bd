"""The tokens of a text, and the text of tokens."""

from aiohttp import web

from services.gateway.bodies import decoded
from services.gateway.connections import Connections
from services.gateway.http.models import ServedModels
from services.gateway.prompts import PromptReader
from services.gateway.tokenizing import DetokenizeBody, TokenizeBody, detokenized, tokenized


class Tokens:
    def __init__(
        self, connections: Connections, models: ServedModels, prompts: PromptReader
    ) -> None:
        self._connections = connections
        self._models = models
        self._prompts = prompts

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
        ]

    async def _tokenize(self, request: web.Request) -> web.Response:
        async with self._connections.arriving():
            body = decoded(await request.read(), TokenizeBody)
        record = self._models.record(body.model)
        lingo = await self._models.lingo(record)
        return web.json_response(await tokenized(body, record, lingo, self._prompts))

    async def _detokenize(self, request: web.Request) -> web.Response:
        async with self._connections.arriving():
            body = decoded(await request.read(), DetokenizeBody)
        record = self._models.record(body.model)
        lingo = await self._models.lingo(record)
        return web.json_response(detokenized(body, record, lingo))
