"""`POST /v1/classify`: an image in, its most probable classes out.

The body is JSON, `{"model", "image", "top_k"}`, with the file in base64 or as a data URL; or a form
(multipart/form-data) with fields of these names. The answer has OpenAI's frame, and its `data` is
what transformers' image classification pipeline gives: the classes, the most probable first.

To everything behind this module, a classification is a generation of one token, whose text is the
label.
"""

import base64
import binascii
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from aiohttp import web

from services.gateway.answer_bodies import Classification, ClassifiedAs
from services.gateway.api_error import ApiError, invalid
from services.gateway.bodies import decoded
from services.gateway.catalog import Sight
from services.gateway.choices import Choice
from services.gateway.core.requests import Request
from services.gateway.generation import Generation
from services.gateway.text import Stops, StopStrings
from shared.clock import now
from shared.ids import RequestId, new_id
from shared.messages.pool import ModelRecord
from shared.messages.serving import Sampling

TOP_K = 5
"""The number of classes in an answer, unless the request says how many."""
FORM = "multipart/form-data"
_NUMBER = re.compile("[0-9]{1,9}")


class ClassifyBody(msgspec.Struct, kw_only=True):
    model: str
    image: str
    top_k: int | None = None


class ClassifyForm(msgspec.Struct, kw_only=True):
    """The same, for the OpenAPI document; aiohttp reads the form."""

    model: str
    image: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
    top_k: int | None = None


class Classify(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    image: bytes
    """The bytes of the file."""
    top_k: int


async def read(request: web.Request) -> Classify:
    """The request. ApiError 400 names the field that is missing or does not fit."""
    if request.content_type == FORM:
        return await _form(request)
    body = decoded(await request.read(), ClassifyBody)
    return Classify(model=body.model, image=_file(body.image), top_k=_top_k(body.top_k))


def choice_of(
    body: Classify, pixels: bytes, sight: Sight, record: ModelRecord, call: str
) -> Choice:
    """The choice of a call. `pixels` are those of its image, `call` is its id."""
    request = Request(
        id=RequestId(new_id("req")),
        model_id=record.model_id,
        call=call,
        prompt=(0,) * record.context_length,
        image=pixels,
        max_tokens=1,
        stop_ids=(),
        sampling=Sampling(logprobs=min(body.top_k, len(sight.labels))),
        waiting_since=now(),
    )
    return Choice(0, request, _Labels(sight.labels), StopStrings(Stops(())))


def answer(answer_id: str, generation: Generation, choice: Choice, sight: Sight) -> Classification:
    """The answer of a generation that has ended."""
    (logprobs,) = choice.logprobs
    return Classification(
        id=f"classify-{answer_id}",
        created=int(time.time()),
        model=generation.record.name,
        data=[
            ClassifiedAs(sight.labels[index], index, math.exp(logprob))
            for index, logprob in logprobs.top
        ],
        usage=generation.usage(),
    )


class _Labels:
    """Implements services.gateway.text.TextStream."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels

    def step(self, token: int) -> str:
        return self._labels[token]

    def flush(self) -> str:
        return ""


async def _form(request: web.Request) -> Classify:
    try:
        fields = await request.post()
    except (web.HTTPException, web.RequestPayloadError, OSError):
        raise
    except Exception as error:  # aiohttp tells what is wrong with a form by errors of any kind
        raise ApiError(400, f"the form cannot be read: {error!r}") from error
    files = [field.file for field in fields.values() if isinstance(field, web.FileField)]
    try:
        return _of_form(fields)
    finally:
        for file in files:
            file.close()


def _of_form(fields: Mapping[str, str | bytes | bytearray | web.FileField]) -> Classify:
    model, image, top_k = fields.get("model"), fields.get("image"), fields.get("top_k")
    if not isinstance(model, str):
        invalid("model", "the form has no such text field")
    if not isinstance(image, web.FileField):
        invalid("image", "the form has no file of this name")
    if top_k is not None and not (isinstance(top_k, str) and _NUMBER.fullmatch(top_k)):
        invalid("top_k", "must be a number")
    count = _top_k(int(top_k) if isinstance(top_k, str) else None)
    return Classify(model=model, image=image.file.read(), top_k=count)


def _file(image: str) -> bytes:
    """The file's bytes, from base64 or a data URL."""
    if image.startswith(("http://", "https://")):
        invalid("image", "URLs are not fetched; send the file itself, in base64")
    if image.startswith("data:"):
        head, comma, image = image.partition(",")
        if not comma or not head.endswith(";base64"):
            invalid("image", "the data URL must be data:image/...;base64,...")
    try:
        return base64.b64decode(image, validate=True)
    except (binascii.Error, ValueError) as error:
        invalid("image", f"not valid base64: {error}")


def _top_k(given: int | None) -> int:
    if given is not None and given < 1:
        invalid("top_k", "must be at least 1")
    return TOP_K if given is None else given
