"""From what a client sends to the tokens of each prompt, within budgets that are checked before any
work: prompts are counted, then their characters, and only then are they read, off the loop."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from services.gateway.api_error import ApiError, invalid
from services.gateway.asked import Asked, Prompt
from services.gateway.catalog import Lingo
from services.gateway.core import admission
from services.gateway.history import Dialogue
from services.gateway.replies.reading import THINK, THOUGHT, Form
from shared.chat_template import developer_role
from shared.confined.jobs import Job, Learn, Refused, Render, Template
from shared.confined.pool import ConfinedPool
from shared.errors import BadInput, ModelError
from shared.messages.pool import ModelRecord
from shared.template_manner import Manner

MAX_WAITING = 1024
"""The most chats of one model that wait for its template."""
MAX_MANNERS = 1024
"""The number of templates whose manner is remembered."""


class Read(NamedTuple):
    """What a request's prompts are to the model."""

    prompts: list[list[int]]
    """The token ids of each."""
    form: Form
    """How the replies are read."""


class PromptReader:
    def __init__(self, pool: ConfinedPool) -> None:
        self._pool = pool
        self._manners: dict[str, Manner] = {}
        """What templates do with tools, by their source."""

    async def read(self, asked: Asked, record: ModelRecord, lingo: Lingo) -> Read:
        """Every prompt. ApiError 400 names what is too much, or has no tokens;
        503: the model's chat template cannot be read. CapacityExceeded."""
        try:
            admission.check_choices(len(asked.prompts), asked.n)
        except BadInput as error:
            raise ApiError(400, str(error), param="n") from error
        return await self.tokens(asked.prompts, record, lingo)

    async def tokens(
        self, prompts: Sequence[Prompt], record: ModelRecord, lingo: Lingo, *, special: bool = True
    ) -> Read:
        """Prompts of one kind. `special`: whether a bare prompt begins as the
        model wants it. Errors as of `read`."""
        field = "messages" if isinstance(prompts[0], Dialogue) else "prompt"
        try:
            found = await self._tokens(prompts, record, lingo, special)
        except admission.TooLong as error:
            code = "context_length_exceeded"
            raise ApiError(400, str(error), param=field, code=code) from error
        for ids in found.prompts:
            if not ids:
                invalid(field, "has no tokens")
            if not 0 <= min(ids) <= max(ids) < lingo.vocab_size:
                invalid(field, f"token ids must be between 0 and {lingo.vocab_size - 1}")
        return found

    async def _tokens(
        self, prompts: Sequence[Prompt], record: ModelRecord, lingo: Lingo, special: bool
    ) -> Read:
        if isinstance(dialogue := prompts[0], Dialogue):
            text = await self._render(dialogue, record, lingo)
            ids = await lingo.codec.encode_chats([text], record.context_length)
            return Read(ids, _form(text, dialogue, lingo))
        return Read(await self._encode(prompts, record, lingo, special), Form())

    async def _encode(
        self, prompts: Sequence[Prompt], record: ModelRecord, lingo: Lingo, special: bool
    ) -> list[list[int]]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            admission.check_chars(len(text), lingo.codec.longest, record.context_length)
        if texts and special:
            return await lingo.codec.encode_prompts(texts, record.context_length)
        if texts:
            return await lingo.codec.encode_chats(texts, record.context_length)
        lists = [prompt for prompt in prompts if isinstance(prompt, list)]
        for ids in lists:
            admission.check_prompt(len(ids), record.context_length)
        return lists

    async def _render(self, dialogue: Dialogue, record: ModelRecord, lingo: Lingo) -> str:
        about_tools = bool(dialogue.tools) or dialogue.first("tool_calls") is not None
        template = lingo.template_for(about_tools)
        if template is None:
            invalid("model", "has no chat template; use /v1/completions")
        admission.check_chars(dialogue.chars, lingo.codec.longest, record.context_length)
        messages: Iterable[Mapping[str, Any]] = dialogue.messages
        if about_tools:
            manner = await self._manner(template, record)
            _check_manner(dialogue, manner, record)
            messages = (_in_manner(message, manner) for message in messages)
        developer = developer_role(template.source)
        job = Render(
            template,
            tuple(
                {**message, "role": developer} if message["role"] == "developer" else dict(message)
                for message in messages
            ),
            dialogue.add_generation_prompt,
            dict(dialogue.arguments),
            lingo.codec.longest * record.context_length,
            tuple(dict(tool) for tool in dialogue.tools),
        )
        return await self._ask(job, record)

    async def _manner(self, template: Template, record: ModelRecord) -> Manner:
        known = self._manners.get(template.source)
        if known is None:
            learned = await self._ask(Learn(template), record)
            known = msgspec.json.decode(learned, type=Manner)
            self._manners[template.source] = known
            if len(self._manners) > MAX_MANNERS:
                del self._manners[next(iter(self._manners))]
        return known

    async def _ask(self, job: Job, record: ModelRecord) -> str:
        outcome = await self._pool.run(job, key=record.model_id, most_waiting=MAX_WAITING)
        if isinstance(outcome, Refused):
            if not outcome.by_template:
                raise BadInput(outcome.why)
            message = f"model {record.name!r} can't be served now: {outcome.why}"
            raise ApiError(503, message, code=ModelError.code, retry_after=1)
        return outcome.text


def _form(prompt: str, dialogue: Dialogue, lingo: Lingo) -> Form:
    """How the reply to a chat can be read."""
    if not lingo.thinks or not dialogue.add_generation_prompt:
        return Form()
    end = prompt.rstrip()
    return Form(thinks=not end.endswith((THINK, THOUGHT)), thinking=end.endswith(THINK))


def _check_manner(dialogue: Dialogue, manner: Manner, record: ModelRecord) -> None:
    """Refuses what the template would leave out of the prompt."""
    template = f"the chat template of model {record.name!r}"
    if dialogue.tools and not manner.tools:
        invalid("tools", f"{template} takes no tools; leave them out")
    calling, answering = dialogue.first("tool_calls"), dialogue.first("tool_call_id")
    if calling is not None and not manner.call:
        invalid(f"messages[{calling}].tool_calls", f"{template} leaves out calls of tools")
    if answering is not None and not manner.results:
        invalid(f"messages[{answering}]", f"{template} leaves out results of tools")


def _in_manner(message: Mapping[str, Any], manner: Manner) -> Mapping[str, Any]:
    """The message as the template reads it."""
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    if manner.text_arguments:
        calls = [{**call, "function": _with_text(call["function"])} for call in calls]
    content = message["content"] or (None if manner.no_content else "")
    return {**message, "content": content, "tool_calls": calls}


def _with_text(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
