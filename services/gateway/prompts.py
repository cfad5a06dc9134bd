"""From what a client sends to the tokens of each prompt, within budgets that are checked before any
work: prompts are counted, then their characters, and only then are they read, off the loop."""

from collections.abc import Sequence
from typing import NamedTuple

from services.gateway.api_error import ApiError, invalid
from services.gateway.asked import Asked, Prompt
from services.gateway.catalog import Lingo
from services.gateway.core import admission
from services.gateway.history import Dialogue
from services.gateway.rendering import ChatRenderer
from services.gateway.replies.form import Form
from shared.confined.pool import ConfinedPool
from shared.errors import BadInput
from shared.messages.pool import ModelRecord


class Read(NamedTuple):
    """What a request's prompts are to the model."""

    prompts: list[list[int]]
    """The token ids of each."""
    form: Form
    """How the replies are read."""


class PromptReader:
    def __init__(self, pool: ConfinedPool) -> None:
        self._renderer = ChatRenderer(pool)

    async def read(self, asked: Asked, record: ModelRecord, lingo: Lingo) -> Read:
        """Every prompt. ApiError 400 names what is too much, or has no tokens;
        503: the model's chat template cannot be read. CapacityExceeded."""
        try:
            admission.check_choices(len(asked.prompts), asked.n)
        except BadInput as error:
            raise ApiError(400, str(error), param="n") from error
        return await self.tokens(asked.prompts, record, lingo, truncated=asked.truncated)

    async def tokens(
        self,
        prompts: Sequence[Prompt],
        record: ModelRecord,
        lingo: Lingo,
        *,
        special: bool = True,
        truncated: int | None = None,
        field: str = "prompt",
    ) -> Read:
        """Prompts of one kind, given in `field`. `special`: whether a bare prompt begins as the
        model wants it. `truncated`: the most tokens of a prompt, of which the last ones stay, and
        of an encoder's the first ones and the special token at its end; None: as many as the
        context has. Errors as of `read`."""
        if isinstance(prompts[0], Dialogue):
            field = "messages"
        context = record.context_length
        if truncated is not None and truncated > context:
            invalid("truncate_prompt_tokens", f"must be at most the model's context, {context}")
        most = context if truncated is None else context * lingo.codec.longest
        try:
            found = await self._tokens(prompts, record, lingo, special, most)
        except admission.TooLong as error:
            code = "context_length_exceeded"
            raise ApiError(400, str(error), param=field, code=code) from error
        for ids in found.prompts:
            if not ids:
                invalid(field, "has no tokens")
            if not 0 <= min(ids) <= max(ids) < lingo.vocab_size:
                invalid(field, f"token ids must be between 0 and {lingo.vocab_size - 1}")
            if truncated is None or len(ids) <= truncated:
                continue
            if lingo.generates:
                begins = isinstance(prompts[0], str) and special and ids[0] == lingo.codec.bos
                del ids[int(begins) : len(ids) - truncated + int(begins)]
            else:
                ends = lingo.codec.special(ids[-1]) is not None
                del ids[truncated - int(ends) : len(ids) - int(ends)]
        return found

    async def _tokens(
        self,
        prompts: Sequence[Prompt],
        record: ModelRecord,
        lingo: Lingo,
        special: bool,
        most: int,
    ) -> Read:
        if isinstance(dialogue := prompts[0], Dialogue):
            (text, tokens), form = await self._renderer.render(dialogue, record, lingo)
            (ids,) = await lingo.codec.encode_chats([text], most)
            return Read([lingo.codec.specials.spell(ids, tokens)], form)
        return Read(await self._encode(prompts, record, lingo, special, most), Form())

    async def _encode(
        self,
        prompts: Sequence[Prompt],
        record: ModelRecord,
        lingo: Lingo,
        special: bool,
        most: int,
    ) -> list[list[int]]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            admission.check_chars(len(text), lingo.codec.longest, record.context_length)
        if texts and special:
            return await lingo.codec.encode_prompts(texts, most)
        if texts:
            return await lingo.codec.encode_chats(texts, most)
        lists = [prompt for prompt in prompts if isinstance(prompt, list)]
        for ids in lists:
            admission.check_prompt(len(ids), most)
        return lists
