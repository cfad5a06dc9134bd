"""What a node's process and its keeper say to each other over a Unix socket.

One datagram (SOCK_SEQPACKET) is one message in JSON. A descriptor may travel with it. Unknown
fields are ignored, so that a newer node can speak to the keeper that an older node started.
"""

from typing import Annotated

import msgspec

LARGEST = 64 << 10
"""Bytes of a message."""
SOCKET = "keeper.sock"
"""Its name in the node's data directory."""
HOLDER = "LS_HOLDER"
"""The environment variable with the process that runs a cluster on one machine. What that leaves
behind is of no use to anybody."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Blocks = Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)]


class _Said(msgspec.Struct, frozen=True, tag=str.lower):
    pass


class Space(_Said, frozen=True):
    """A model's place in a memory, and what of it is there.

    The node says it when it changes; the keeper says it to the next process. Bytes that the row
    names were verified when they came. Who takes them over verifies them again.
    """

    memory: Name
    model: Name
    """The model's id, which is the digest of its manifest."""
    offset: Count
    nbytes: Count
    """From `offset` on, in the memory."""
    blocks: Blocks = ()
    """The blocks that are complete."""
    active: bool = False
    """Whether the engine had the model open."""
    part: tuple[Count, Count] | None = None
    """(start, stop) of the blocks that have room there. None: all."""


# --- from the node -----------------------------------------------------------


class Claim(_Said, frozen=True):
    """First message of a process: it wants to be the owner. It is answered with Granted as soon as
    no other process can touch the memories any more."""

    node: Name


class Hold(_Said, frozen=True):
    """A memory to be held, in place of the memory of that name. The memfd comes with it."""

    memory: Name
    nbytes: Count
    about: Annotated[str, msgspec.Meta(max_length=500)] = ""
    """For the next process: what the memory has, in the node's own terms."""


class Drop(_Said, frozen=True):
    """The memory need not be held any more, nor what is in it."""

    memory: Name


class Forget(_Said, frozen=True):
    """The model's place is about to be used for something else."""

    memory: Name
    model: Name


class Alive(_Said, frozen=True):
    """The owner is at work, as this generation of the node; 0: it has none yet."""

    generation: Count


# --- from the keeper ---------------------------------------------------------


class Waits(_Said, frozen=True):
    """Another process is the owner: this one's turn comes when that one has ended."""

    pid: Count


class Refused(_Said, frozen=True):
    why: str


class Held(_Said, frozen=True):
    """A memory that outlived its process. The memfd comes with it."""

    memory: Name
    nbytes: Count
    about: str = ""


class Granted(_Said, frozen=True):
    """The process is the owner. What is held was said before this."""

    generations: tuple[Count, ...] = ()
    """Of the processes before: they have ended."""


Asked = Claim | Hold | Drop | Space | Forget | Alive
Told = Waits | Refused | Held | Space | Granted

_encoder = msgspec.json.Encoder()
_asked: msgspec.json.Decoder[Asked] = msgspec.json.Decoder(Asked)
_told: msgspec.json.Decoder[Told] = msgspec.json.Decoder(Told)


def encode(message: Asked | Told) -> bytes:
    return _encoder.encode(message)


def decode_asked(data: bytes) -> Asked:
    """msgspec.MsgspecError or UnicodeDecodeError: it is no message of a node."""
    return _asked.decode(data)


def decode_told(data: bytes) -> Told:
    """msgspec.MsgspecError or UnicodeDecodeError: it is no message of a keeper."""
    return _told.decode(data)
