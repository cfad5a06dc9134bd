"""From what a client sends to the tokens of each prompt, within budgets that are checked before any
work: prompts are counted, then their characters, and only then are they read, off the loop."""

from collections.abc import Sequence

from services.gateway.api_error import ApiError, invalid
from services.gateway.asked import Asked, Dialogue, Prompt
from services.gateway.catalog import Lingo
from services.gateway.core import admission
from shared.chat_template import developer_role
from shared.confined.jobs import Refused, Render
from shared.confined.pool import ConfinedPool
from shared.errors import BadInput, ModelError
from shared.messages.pool import ModelRecord

MAX_WAITING = 1024
"""The most chats of one model that wait for its template."""


class PromptReader:
    def __init__(self, pool: ConfinedPool) -> None:
        self._pool = pool

    async def read(self, asked: Asked, record: ModelRecord, lingo: Lingo) -> list[list[int]]:
        """The token ids of every prompt. ApiError 400 names what is too much, or has no tokens;
        503: the model's chat template cannot be read. CapacityExceeded."""
        try:
            admission.check_choices(len(asked.prompts), asked.n)
        except BadInput as error:
            raise ApiError(400, str(error), param="n") from error
        return await self.tokens(asked.prompts, record, lingo)

    async def tokens(
        self, prompts: Sequence[Prompt], record: ModelRecord, lingo: Lingo, *, special: bool = True
    ) -> list[list[int]]:
        """The token ids of prompts of one kind. `special`: whether a bare prompt begins as the
        model wants it. Errors as of `read`."""
        field = "messages" if isinstance(prompts[0], Dialogue) else "prompt"
        try:
            found = await self._tokens(prompts, record, lingo, special)
        except admission.TooLong as error:
            code = "context_length_exceeded"
            raise ApiError(400, str(error), param=field, code=code) from error
        for ids in found:
            if not ids:
                invalid(field, "has no tokens")
            if not 0 <= min(ids) <= max(ids) < lingo.vocab_size:
                invalid(field, f"token ids must be between 0 and {lingo.vocab_size - 1}")
        return found

    async def _tokens(
        self, prompts: Sequence[Prompt], record: ModelRecord, lingo: Lingo, special: bool
    ) -> list[list[int]]:
        if isinstance(prompts[0], Dialogue):
            rendered = [
                await self._render(prompt, record, lingo)
                for prompt in prompts
                if isinstance(prompt, Dialogue)
            ]
            return await lingo.codec.encode_chats(rendered, record.context_length)
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
        if lingo.template is None:
            invalid("model", "has no chat template; use /v1/completions")
        most = lingo.codec.longest * record.context_length
        admission.check_chars(
            sum(len(message.get("content", "")) for message in dialogue.messages),
            lingo.codec.longest,
            record.context_length,
        )
        developer = developer_role(lingo.template.source)
        job = Render(
            lingo.template,
            tuple(
                {**message, "role": developer} if message["role"] == "developer" else dict(message)
                for message in dialogue.messages
            ),
            dialogue.add_generation_prompt,
            dict(dialogue.arguments),
            most,
        )
        outcome = await self._pool.run(job, key=record.model_id, most_waiting=MAX_WAITING)
        if isinstance(outcome, Refused):
            if not outcome.by_template:
                raise BadInput(outcome.why)
            message = f"model {record.name!r} can't be served now: {outcome.why}"
            raise ApiError(503, message, code=ModelError.code, retry_after=1)
        return outcome.text
