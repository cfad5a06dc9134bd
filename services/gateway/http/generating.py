"""From what is asked of a model to the answer that is sent, for every API that generates text."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import structlog
from aiohttp import web

from services.gateway.api_error import invalid
from services.gateway.asked import Asked
from services.gateway.books import Books, Tab
from services.gateway.choices import choices_of
from services.gateway.connections import Connections
from services.gateway.encoder import Encoder
from services.gateway.event_ids import NumberedAnswers
from services.gateway.frontend import Frontend
from services.gateway.generation import Generation
from services.gateway.grammars import GrammarChecker
from services.gateway.history import Dialogue
from services.gateway.http import sending
from services.gateway.http.call import SESSION, SHOW_PATH
from services.gateway.http.models import ServedModels
from services.gateway.http.outer import CALLER, ID, SPAN
from services.gateway.idempotency import Key, key_of, marks_of
from services.gateway.keyed_answers import KeyedAnswers
from services.gateway.metrics import Metrics
from services.gateway.prompts import PromptReader, Read
from services.gateway.replies.forcing import grammar_of_reply
from services.gateway.text import TextCodec
from shared.errors import BadInput

EncoderOf = Callable[[Generation, str, TextCodec, int], Encoder]
"""What writes an answer: of the generation, with an id, and begun at a time in seconds since the
epoch."""


class Generating:
    def __init__(
        self,
        connections: Connections,
        books: Books,
        models: ServedModels,
        prompts: PromptReader,
        grammars: GrammarChecker,
        frontend: Frontend,
        metrics: Metrics,
        keyed: KeyedAnswers,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._connections = connections
        self._books = books
        self._models = models
        self._prompts = prompts
        self._grammars = grammars
        self._frontend = frontend
        self._metrics = metrics
        self._keyed = keyed
        self._log = log

    async def body(self, request: web.Request) -> bytes:
        return await self._connections.body(request)

    async def count(self, request: web.Request, asked: Asked) -> int:
        """The number of tokens in the prompt."""
        record = self._models.record(request, asked.model)
        lingo = await self._models.writer(record)
        read = await self._prompts.read(asked, record, lingo)
        return sum(map(len, read.prompts))

    async def answer(
        self, request: web.Request, asked: Asked, encoder_of: EncoderOf
    ) -> web.StreamResponse:
        if session := request.headers.get(SESSION):
            asked = msgspec.structs.replace(asked, session=session)
        record = self._models.record(request, asked.model)
        lingo = await self._models.writer(record)
        read = await self._prompts.read(asked, record, lingo)
        asked, read = await self._structured(asked, read)
        key = key_of(request.headers, request.path, await request.read())
        seed = None if key is None else key.seed
        choices = choices_of(asked, record, lingo, read, request[ID], seed)
        prompt_tokens = sum(len(prompt) for prompt in read.prompts)
        tab = Tab(self._books, request[CALLER], asked.tier)
        generation = Generation(
            self._frontend, self._metrics, record, choices, prompt_tokens, request[SPAN], tab
        )
        generation.shows_path = SHOW_PATH in request.headers and request[CALLER].admin
        codec = lingo.codec
        if key is not None:
            return await self._answer_keyed(request, asked, key, generation, codec, encoder_of)
        async with generation:
            await asyncio.sleep(0)  # the requests go to their nodes before anything else is done
            encoder = encoder_of(generation, request[ID], codec, int(time.time()))
            # What takes long to write (a line for each token of the prompt) is written by its task.
            direct = None if generation.scored else self._connections.of(request.transport)
            if asked.stream:
                return await sending.stream(
                    request, generation, encoder, direct, self._log, request[ID]
                )
            return await sending.whole(generation, encoder)

    async def _answer_keyed(
        self,
        request: web.Request,
        asked: Asked,
        key: Key,
        generation: Generation,
        codec: TextCodec,
        encoder_of: EncoderOf,
    ) -> web.StreamResponse:
        """Answers a request that may have been answered in part, by any gateway."""
        count = len(generation.choices)
        marks = marks_of(request.headers, count)
        async with self._keyed.reader(key, generation) as reader:
            encoder = encoder_of(reader.generation, reader.answer_id, codec, reader.created)
            if not asked.stream:
                return await sending.whole(reader, encoder)
            numbered = NumberedAnswers(encoder, marks, count)
            return await sending.stream(request, reader, numbered, None, self._log, request[ID])

    async def _structured(self, asked: Asked, read: Read) -> tuple[Asked, Read]:
        """What is asked for with the grammar of the whole reply. ApiError 400: it cannot be
        followed."""
        first = asked.prompts[0]
        use = first.tools if isinstance(first, Dialogue) else None
        content, form = asked.rules.grammar, read.form
        if (
            use
            and not use.required
            and (form.special or asked.ignore_eos or asked.rules.min_tokens)
        ):
            use = None  # no grammar can have such text: calls are read as they come
        if use is None and not content:
            return asked, read
        try:
            grammar = grammar_of_reply(form, use, content)
            if grammar:
                await self._grammars.check(grammar)
        except BadInput as error:
            if use is None or content:
                invalid(asked.grammar_field, str(error))
            if use.required or use.strict:
                invalid("tools", str(error))
            return asked, read
        rules = msgspec.structs.replace(asked.rules, grammar=grammar)
        sure = replace(form, sure=use is not None)
        return msgspec.structs.replace(asked, rules=rules), read._replace(form=sure)
