"""The wire form of stage messages: a msgpack header and, for a `Forward`, hidden states.

The payload is the tensor's own bytes, [sum(count), hidden_size] row-major in the model's dtype.
Nothing is copied between a CPU tensor and the transport, in either direction.
"""

import msgspec
import torch

from services.node.core import wellformed
from services.node.core.microbatches import (
    Admit,
    Admitted,
    Failed,
    Forward,
    Free,
    KvAsk,
    KvDone,
    KvHere,
    Pull,
    Sampled,
    StageMessage,
    Yield,
    Yielded,
)
from services.node.transport.base import Buffer
from shared.errors import ProtocolViolation
from shared.versions import beside, refusal

VERSION = 7
OLDEST = 6
"""The oldest version that is understood."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


_Message = (
    Admit
    | Admitted
    | Pull
    | Forward
    | Sampled
    | Free
    | Failed
    | KvAsk
    | KvHere
    | KvDone
    | Yield
    | Yielded
)


class _Header(msgspec.Struct, frozen=True):
    v: int
    message: _Message
    dtype: str = ""
    hidden_size: int = 0
    cause: str = ""
    """The id of the event that made the sender say it."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def encode(
    message: StageMessage, hidden: torch.Tensor | None, cause: str = ""
) -> tuple[bytes, list[Buffer]]:
    """(header, payload) for the transport. The payload is `hidden`'s own memory if that is on the
    CPU, so the tensor must not be written to any more."""
    if not isinstance(message, _Message):
        raise TypeError(f"{type(message).__name__} has no wire form")
    if hidden is None:
        return _encoder.encode(_Header(VERSION, message, cause=cause)), []
    on_cpu = hidden.detach().to("cpu").contiguous()
    header = _Header(VERSION, message, _NAMES[on_cpu.dtype], on_cpu.shape[1], cause)
    # numpy has no bfloat16, so the bytes are taken through uint8.
    return _encoder.encode(header), [on_cpu.view(-1).view(torch.uint8).numpy().data]


def decode(
    header: memoryview, payload: memoryview
) -> tuple[StageMessage, torch.Tensor | None, str]:
    """The message, its hidden states (a view of `payload` if that is writable), and its cause.

    ProtocolViolation if anything does not fit (`services.node.core.wellformed`).
    """
    try:
        parsed = _decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(f"malformed stage message: {error}") from error
    if parsed.v not in beside(VERSION, OLDEST):
        raise ProtocolViolation(refusal("a stage message", parsed.v, VERSION))
    message = parsed.message
    wellformed.check(message)
    if isinstance(message, Forward):
        return message, _hidden(message, parsed, payload), parsed.cause
    _require(not payload.nbytes, f"{type(message).__name__} came with {payload.nbytes} bytes")
    return message, None, parsed.cause


def _hidden(message: Forward, header: _Header, payload: memoryview) -> torch.Tensor:
    dtype = DTYPES.get(header.dtype)
    if dtype is None or header.hidden_size < 1:
        raise ProtocolViolation(f"hidden states of {header.hidden_size} x {header.dtype!r}")
    positions = sum(row.count for row in message.rows)
    expected = positions * header.hidden_size * dtype.itemsize
    _require(payload.nbytes == expected, f"{payload.nbytes} payload bytes, {expected} expected")
    buffer = bytearray(payload) if payload.readonly else payload
    return torch.frombuffer(buffer, dtype=dtype).view(positions, header.hidden_size)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ProtocolViolation(f"malformed stage message: {what}")
