"""Completions and chats."""

import structlog
from aiohttp import web

from services.gateway.answer_bodies import Chat, ChatChunk, Completion
from services.gateway.answers import Answers
from services.gateway.api_error import invalid
from services.gateway.asked import Asked, chat, completion
from services.gateway.bodies import ChatBody, CompletionBody
from services.gateway.choices import choices_of
from services.gateway.connections import Connections
from services.gateway.event_ids import NumberedAnswers
from services.gateway.frontend import Frontend
from services.gateway.generation import Generation
from services.gateway.grammars import GrammarChecker
from services.gateway.http import sending
from services.gateway.http.call import Call
from services.gateway.http.models import ServedModels
from services.gateway.http.outer import ID
from services.gateway.idempotency import Key, key_of, marks_of
from services.gateway.keyed_answers import KeyedAnswers
from services.gateway.metrics import Metrics
from services.gateway.prompts import PromptReader
from services.gateway.text import TextCodec
from shared.errors import BadInput


class Completions:
    def __init__(
        self,
        connections: Connections,
        models: ServedModels,
        prompts: PromptReader,
        grammars: GrammarChecker,
        frontend: Frontend,
        metrics: Metrics,
        keyed: KeyedAnswers,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._connections = connections
        self._models = models
        self._prompts = prompts
        self._grammars = grammars
        self._frontend = frontend
        self._metrics = metrics
        self._keyed = keyed
        self._log = log

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
        async with self._connections.arriving():
            body = await request.read()
        return await self._complete(request, completion(body))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        async with self._connections.arriving():
            body = await request.read()
        return await self._complete(request, chat(body))

    async def _complete(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        record = self._models.record(asked.model)
        lingo = await self._models.lingo(record)
        prompts = await self._prompts.read(asked, record, lingo)
        key = key_of(request.headers, request.path, await request.read())
        seed = None if key is None else key.seed
        choices = choices_of(asked, record, lingo, prompts, request[ID], seed)
        await self._check_grammar(asked)
        prompt_tokens = sum(len(prompt) for prompt in prompts)
        trace = request.headers.get("traceparent", "")
        generation = Generation(
            self._frontend, self._metrics, record, choices, prompt_tokens, trace
        )
        if key is not None:
            return await self._complete_keyed(request, asked, key, generation, lingo.codec)
        answers = Answers(asked, generation, request[ID], lingo.codec)
        async with generation:
            if asked.stream:
                return await sending.stream(request, generation, answers, self._log, request[ID])
            return await sending.whole(generation, answers)

    async def _complete_keyed(
        self, request: web.Request, asked: Asked, key: Key, generation: Generation, codec: TextCodec
    ) -> web.StreamResponse:
        """Answers a request that may have been answered in part, by any gateway."""
        count = len(generation.choices)
        marks = marks_of(request.headers, count)
        async with self._keyed.reader(key, generation) as reader:
            answers = Answers(asked, reader.generation, reader.answer_id, codec, reader.created)
            if not asked.stream:
                return await sending.whole(reader, answers)
            numbered = NumberedAnswers(answers, marks, count)
            return await sending.stream(request, reader, numbered, self._log, request[ID])

    async def _check_grammar(self, asked: Asked) -> None:
        if not asked.rules.grammar:
            return
        try:
            await self._grammars.check(asked.rules.grammar)
        except BadInput as error:
            invalid(asked.grammar_field, str(error))
