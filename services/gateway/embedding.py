"""`POST /v1/embeddings`: texts in, a vector of each out, as OpenAI has it.

To everything behind this module, an embedding is a generation without tokens.
"""

import base64
from typing import Any, Literal

import msgspec
import numpy as np

from services.gateway.answer_bodies import Embedding, EmbeddingUsage
from services.gateway.api_error import ApiError, invalid
from services.gateway.asked import Prompt, prompts_of
from services.gateway.bodies import decoded
from services.gateway.catalog import Lingo
from services.gateway.choices import Choice
from services.gateway.core.requests import Request
from services.gateway.text import DecodeStream, Stops, StopStrings
from shared.clock import now
from shared.ids import RequestId, new_id
from shared.messages.pool import ModelRecord
from shared.messages.serving import Pooling, Sampling

MAX_INPUTS = 2048
"""The most inputs that a call may have. OpenAI's API has the same limit."""
MAX_TOKENS = 1 << 20
"""The most tokens that all inputs of a call may have together."""
MAX_NUMBERS = 1 << 22
"""The most numbers that all vectors of an answer may have together. As `float` they take 80 MB of
JSON."""


class EmbeddingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    """For models whose vectors may be cut."""
    user: Any = None
    """Has no effect."""
    normalize: bool | None = None
    """Whether vectors have the length 1. Null: as the model says, or else they do."""
    pooling: Literal["cls", "last", "mean"] | None = None
    """The state of the first token, of the last, or the mean of all. Null: as the model says."""
    truncate_prompt_tokens: int | None = None


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a call asks for, checked as far as that can be done without the model."""

    model: str
    inputs: tuple[Prompt, ...]
    base64: bool
    dimensions: int | None
    normalized: bool | None
    """None: as the model says."""
    pooling: Pooling | None
    """None: the model's."""
    truncated: int | None


def wanted(raw: bytes) -> Wanted:
    """ApiError 400 names the field that does not fit."""
    body = decoded(raw, EmbeddingBody)
    inputs = prompts_of(body.input, "input", MAX_INPUTS)
    for field in ("dimensions", "truncate_prompt_tokens"):
        value = getattr(body, field)
        if value is not None and value < 1:
            invalid(field, "must be at least 1")
    return Wanted(
        model=body.model,
        inputs=inputs,
        base64=body.encoding_format == "base64",
        dimensions=body.dimensions,
        normalized=body.normalize,
        pooling=Pooling(body.pooling) if body.pooling else None,
        truncated=body.truncate_prompt_tokens,
    )


def size_of(asked: Wanted, lingo: Lingo) -> int:
    """How many numbers each vector of the answer has. ApiError 400."""
    size = lingo.embeds.cut(asked.dimensions)
    if size * len(asked.inputs) > MAX_NUMBERS:
        invalid("input", f"at most {MAX_NUMBERS // size} inputs in a request to this model")
    return size


def choices_of(
    asked: Wanted, record: ModelRecord, lingo: Lingo, prompts: list[list[int]], call: str
) -> list[Choice]:
    """One for each prompt. `call`: the call's id. ApiError 400."""
    pooling = asked.pooling or lingo.embeds.pooling
    if pooling is None:
        invalid("model", "makes vectors in a way that is not supported; give pooling: last or mean")
    if pooling is Pooling.CLS and lingo.generates:
        message = "cls is for encoders: in this model the first state depends on nothing else"
        invalid("pooling", message)
    if (tokens := sum(map(len, prompts))) > MAX_TOKENS:
        invalid("input", f"at most {MAX_TOKENS} tokens in a request, not {tokens}")
    nothing = DecodeStream(lingo.codec, (), frozenset())
    return [
        Choice(
            number,
            Request(
                id=RequestId(new_id("req")),
                model_id=record.served_by,
                adapter=record.adapter,
                call=call,
                prompt=tuple(prompt),
                max_tokens=1,
                stop_ids=(),
                sampling=Sampling(),
                pooling=pooling,
                waiting_since=now(),
            ),
            nothing,
            StopStrings(Stops(())),
            prompt=number,
            silent=True,
        )
        for number, prompt in enumerate(prompts)
    ]


def written(asked: Wanted, choice: Choice, lingo: Lingo, size: int) -> bytes:
    """The JSON of a vector that has come. ApiError 500: it is not the model's."""
    if len(choice.vector) != 4 * lingo.embeds.size:
        message = f"a vector has {len(choice.vector)} bytes, not {4 * lingo.embeds.size}"
        raise ApiError(500, message)
    vector = np.frombuffer(choice.vector, "<f4")[:size].astype(np.float64)
    normalized = lingo.embeds.normalized if asked.normalized is None else asked.normalized
    if normalized and (length := np.linalg.norm(vector)):
        vector /= length
    found = vector.astype("<f4")
    body = base64.b64encode(found.tobytes()).decode() if asked.base64 else found.tolist()
    return msgspec.json.encode(Embedding(choice.index, body))


def answer(vectors: list[bytes], model: str, tokens: int) -> bytes:
    """The JSON of the answer. `vectors`: as `written`, in order."""
    rest = {"model": model, "usage": EmbeddingUsage(tokens, tokens)}
    return b'{"object":"list","data":[%b],%b' % (
        b",".join(vectors),
        msgspec.json.encode(rest)[1:],
    )
