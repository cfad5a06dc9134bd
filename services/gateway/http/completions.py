"""Completions and chats, as OpenAI has them."""

from functools import partial

from aiohttp import web

from services.gateway.answer_bodies import Chat, ChatChunk, Completion
from services.gateway.answers import Answers
from services.gateway.asked import chat, completion
from services.gateway.bodies import ChatBody, CompletionBody
from services.gateway.http.call import Call
from services.gateway.http.generating import Generating


class Completions:
    def __init__(self, generating: Generating) -> None:
        self._generating = generating

    def calls(self) -> list[Call]:
        return [
            Call(
                "POST",
                "/v1/completions",
                self._completions,
                "complete",
                "Text after a prompt",
                Completion,
                body=CompletionBody,
                events=Completion,
                names_model=True,
                generates=True,
                keyed=True,
            ),
            Call(
                "POST",
                "/v1/chat/completions",
                self._chat,
                "chat",
                "Text after messages, by the model's chat template",
                Chat,
                body=ChatBody,
                events=ChatChunk,
                names_model=True,
                generates=True,
                keyed=True,
            ),
        ]

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = completion(await self._generating.body(request))
        return await self._generating.answer(request, asked, partial(Answers, asked))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = chat(await self._generating.body(request))
        return await self._generating.answer(request, asked, partial(Answers, asked))
