"""OpenAI's Responses API."""

from functools import partial

from aiohttp import web

from services.gateway.api_error import renamed
from services.gateway.bodies import decoded
from services.gateway.http.call import Call
from services.gateway.http.generating import Generating
from services.gateway.responses.answer_bodies import Response, ResponseEvent
from services.gateway.responses.answers import ResponsesAnswers
from services.gateway.responses.asked import NAMES, asked_of
from services.gateway.responses.bodies import ResponsesBody


class Responses:
    def __init__(self, generating: Generating) -> None:
        self._generating = generating

    def calls(self) -> list[Call]:
        return [
            Call(
                "POST",
                "/v1/responses",
                self._responses,
                "create_response",
                "What follows a conversation, as items",
                Response,
                body=ResponsesBody,
                events=ResponseEvent,
                names_model=True,
                generates=True,
                keyed=True,
            )
        ]

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = decoded(await self._generating.body(request), ResponsesBody)
        with renamed(NAMES):
            asked = asked_of(body)
            encoder_of = partial(ResponsesAnswers, body, asked)
            return await self._generating.answer(request, asked, encoder_of)
