"""`/tokenize` and `/detokenize`, as vLLM has them: a model's tokens, without running it."""

import msgspec

from services.gateway.answer_bodies import DetokenizeAnswer, TokenizeAnswer
from services.gateway.api_error import invalid
from services.gateway.asked import Prompt
from services.gateway.bodies import TokenizeBody
from services.gateway.catalog import Lingo
from services.gateway.core import admission
from services.gateway.history import dialogue_of
from services.gateway.prompts import PromptReader
from services.gateway.replies.tools import tools_of
from shared.errors import BadInput
from shared.messages.pool import ModelRecord


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    tokens: list[int]


async def tokenized(
    body: TokenizeBody, record: ModelRecord, lingo: Lingo, prompts: PromptReader
) -> TokenizeAnswer:
    """ApiError 400 names the field that does not fit."""
    read = await prompts.tokens(
        (_prompt(body),), record, lingo, special=body.add_special_tokens is not False
    )
    (tokens,) = read.prompts
    texts = [lingo.codec.token_text(token) for token in tokens] if body.return_token_strs else None
    return TokenizeAnswer(len(tokens), record.context_length, tokens, texts)


def _prompt(body: TokenizeBody) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        invalid("prompt", "give either a prompt or messages")
    if body.messages is not None:
        return dialogue_of(body, tools_of(body.tools or ()))
    assert body.prompt is not None
    return body.prompt


def detokenized(body: DetokenizeBody, record: ModelRecord, lingo: Lingo) -> DetokenizeAnswer:
    """ApiError 400: there are too many tokens, or they are none of the model's."""
    try:
        admission.check_prompt(len(body.tokens), record.context_length)
    except BadInput as error:
        invalid("tokens", str(error))
    if not all(0 <= token < lingo.vocab_size for token in body.tokens):
        invalid("tokens", f"token ids must be between 0 and {lingo.vocab_size - 1}")
    return DetokenizeAnswer(lingo.codec.decode(body.tokens))
