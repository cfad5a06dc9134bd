"""What is done for others in a process that it may kill, and what comes of it."""

from typing import Any

import msgspec

HEAD_BYTES = 4
"""A frame begins with the length of the rest."""


class Check(msgspec.Struct, frozen=True, tag=True):
    """Whether a grammar can be followed. Answer: an empty text."""

    grammar: str


class Template(msgspec.Struct, frozen=True):
    """A model's chat template."""

    source: str
    special_tokens: dict[str, str]
    """`bos_token` and the like."""


class Compile(msgspec.Struct, frozen=True, tag=True):
    """Whether a chat template can be read. Answer: an empty text."""

    template: Template


class Render(msgspec.Struct, frozen=True, tag=True):
    """The prompt that a chat template makes."""

    template: Template
    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool
    arguments: dict[str, Any]
    most_chars: int
    """A longer prompt is refused."""
    tools: tuple[dict[str, Any], ...] = ()


class Learn(msgspec.Struct, frozen=True, tag=True):
    """What a template does with tools. Answer: a `Manner` in JSON."""

    template: Template


Job = Check | Compile | Render | Learn


class Done(msgspec.Struct, frozen=True, tag=True):
    text: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    why: str
    by_template: bool = False
    """Whether the template is at fault, whatever is asked of it."""


Outcome = Done | Refused

_encoder = msgspec.msgpack.Encoder()
_jobs: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)
_outcomes: msgspec.msgpack.Decoder[Outcome] = msgspec.msgpack.Decoder(Outcome)


def encode(what: Job | Outcome) -> bytes:
    """A frame: its length, and what it holds."""
    body = _encoder.encode(what)
    return len(body).to_bytes(HEAD_BYTES) + body


def body_bytes(head: bytes) -> int:
    """The size of what follows a frame's first bytes."""
    return int.from_bytes(head)


def decode_job(body: bytes) -> Job:
    return _jobs.decode(body)


def decode_outcome(body: bytes) -> Outcome:
    return _outcomes.decode(body)
