"""Wire form of what stages tell each other: a msgpack header and, in a `Forward`, hidden states.

The payload is the tensor's own bytes, [sum(count), hidden_size] row-major in the model's dtype:
nothing is copied between a CPU tensor and the transport, in either direction.
"""

from itertools import pairwise

import msgspec
import torch

from services.node.core.microbatches import Failed, Forward, Free, Sampled, StageMessage
from services.node.transport.base import Buffer
from shared.errors import ProtocolViolation

VERSION = 4
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _Header(msgspec.Struct, frozen=True):
    v: int
    message: Forward | Sampled | Free | Failed
    dtype: str = ""
    hidden_size: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def encode(message: StageMessage, hidden: torch.Tensor | None) -> tuple[bytes, list[Buffer]]:
    """(header, payload) for the transport. The payload is `hidden`'s memory if that is on the
    CPU: the tensor must not be written to any more."""
    if not isinstance(message, Forward | Sampled | Free | Failed):
        raise TypeError(f"{type(message).__name__} has no wire form")
    if hidden is None:
        return _encoder.encode(_Header(VERSION, message)), []
    on_cpu = hidden.detach().to("cpu").contiguous()
    header = _Header(VERSION, message, _NAMES[on_cpu.dtype], on_cpu.shape[1])
    # numpy has no bfloat16: the bytes are taken through uint8.
    return _encoder.encode(header), [on_cpu.view(-1).view(torch.uint8).numpy().data]


def decode(header: memoryview, payload: memoryview) -> tuple[StageMessage, torch.Tensor | None]:
    """The message and its hidden states (a view of `payload` where that is writable).

    ProtocolViolation if anything does not fit.
    """
    try:
        parsed = _decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(f"malformed stage message: {error}") from error
    if parsed.v != VERSION:
        raise ProtocolViolation(
            f"stage message of version {parsed.v}, this node speaks {VERSION}: "
            f"run the same release everywhere"
        )
    message = parsed.message
    if not isinstance(message, Forward):
        if payload.nbytes:
            raise ProtocolViolation(f"{type(message).__name__} came with {payload.nbytes} bytes")
        return message, None
    _check_forward(message)
    return message, _hidden(message, parsed, payload)


def _check_forward(message: Forward) -> None:
    stages = message.path.stages
    _require(0 < message.stage < len(stages), f"stage {message.stage} of {len(stages)}")
    bounds = [(stage.start, stage.stop) for stage in stages]
    _require(all(start < stop for start, stop in bounds), "a stage without blocks")
    follows = all(before[1] == after[0] for before, after in pairwise(bounds))
    _require(follows and bounds[0][0] == 0, "stages that do not follow on each other")
    _require(bool(message.rows), "no rows")
    keys = {row.sequence for row in message.rows}
    _require(len(keys) == len(message.rows), "two rows of one sequence")
    for row in message.rows:
        fits = row.position >= 0 and row.count > 0 and row.position + row.count <= row.limit
        _require(fits, f"positions {row.position} + {row.count} of {row.limit}")
        _require(not row.tokens and not row.image, "a prompt for a later stage")
        _require(row.proposed < row.count, f"{row.proposed} of {row.count} positions proposed")
        if row.draw and (context := row.draw.context):
            generated = len(context.tokens) - context.prompt_tokens
            fits = context.prompt_tokens > 0 and generated == row.draw.index
            _require(fits and min(context.tokens) >= 0, "rules without the tokens so far")


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
        raise ProtocolViolation(f"malformed micro-batch: {what}")
