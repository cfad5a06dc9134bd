"""Anthropic's Messages API."""

from functools import partial

from aiohttp import web

from services.gateway.api_error import renamed
from services.gateway.bodies import decoded
from services.gateway.http import sending
from services.gateway.http.call import Call
from services.gateway.http.generating import Generating
from services.gateway.messages.answer_bodies import Event, Message, MessagesError, TokensCount
from services.gateway.messages.answers import MessagesAnswers
from services.gateway.messages.asked import NAMES, asked_of, counted_of
from services.gateway.messages.bodies import CountTokensBody, MessagesBody


class Messages:
    def __init__(self, generating: Generating) -> None:
        self._generating = generating

    def calls(self) -> list[Call]:
        return [
            Call(
                "POST",
                "/v1/messages",
                self._messages,
                "create_message",
                "The next message of a conversation, as Anthropic has it",
                Message,
                body=MessagesBody,
                events=Event,
                error=MessagesError,
                names_model=True,
                generates=True,
                keyed=True,
            ),
            Call(
                "POST",
                "/v1/messages/count_tokens",
                self._count_tokens,
                "count_message_tokens",
                "The number of tokens in the prompt of a message",
                TokensCount,
                body=CountTokensBody,
                error=MessagesError,
                names_model=True,
            ),
        ]

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        body = decoded(await self._generating.body(request), MessagesBody)
        with renamed(NAMES):
            asked = asked_of(body)
            return await self._generating.answer(request, asked, partial(MessagesAnswers, asked))

    async def _count_tokens(self, request: web.Request) -> web.Response:
        body = decoded(await self._generating.body(request), CountTokensBody)
        with renamed(NAMES):
            count = await self._generating.count(request, counted_of(body))
        return sending.as_json(TokensCount(count))
