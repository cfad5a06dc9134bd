"""The tokens of a text, and the text of tokens."""

from aiohttp import web

from services.gateway.answer_bodies import DetokenizeAnswer, TokenizeAnswer
from services.gateway.bodies import TokenizeBody, decoded
from services.gateway.connections import Connections
from services.gateway.http import sending
from services.gateway.http.call import Call
from services.gateway.http.models import ServedModels
from services.gateway.prompts import PromptReader
from services.gateway.tokenizing import DetokenizeBody, detokenized, tokenized


class Tokens:
    def __init__(
        self, connections: Connections, models: ServedModels, prompts: PromptReader
    ) -> None:
        self._connections = connections
        self._models = models
        self._prompts = prompts

    def calls(self) -> list[Call]:
        return [
            Call(
                "POST",
                "/tokenize",
                self._tokenize,
                "tokenize",
                "The tokens of a prompt or of messages",
                TokenizeAnswer,
                body=TokenizeBody,
                names_model=True,
            ),
            Call(
                "POST",
                "/detokenize",
                self._detokenize,
                "detokenize",
                "The text of tokens",
                DetokenizeAnswer,
                body=DetokenizeBody,
                names_model=True,
            ),
        ]

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = decoded(await self._connections.body(request), TokenizeBody)
        record = self._models.record(request, body.model)
        lingo = await self._models.lingo(record)
        return sending.as_json(await tokenized(body, record, lingo, self._prompts))

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = decoded(await self._connections.body(request), DetokenizeBody)
        record = self._models.record(request, body.model)
        lingo = await self._models.lingo(record)
        return sending.as_json(detokenized(body, record, lingo))
