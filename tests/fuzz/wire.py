"""Fuzzes every parser of the data plane: any bytes are a value, which is said again the same, or a
ProtocolViolation.

python -m tests.fuzz.wire [-max_total_time=600] [-runs=100000] [CORPUS_DIRECTORY]
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["services.node", "shared"]):
    from services.node.core.microbatches import (
        Admit,
        Admitted,
        Failed,
        Free,
        Pull,
        Sampled,
        StageMessage,
    )
    from services.node.execution import activations
    from services.node.transport import wire
    from services.node.transport.direct import Place
    from shared.errors import ProtocolViolation

from tests.unit.node.execution.test_activations import FORWARD, HIDDEN

MAX_PAYLOAD = 1 << 20


def prefix(data: bytes) -> None:
    found = wire.parse_prefix(data, max_payload=MAX_PAYLOAD)
    assert found.body <= wire.MAX_BODY
    assert found.payload <= MAX_PAYLOAD
    said = wire.encode_prefix(found.kind, id=found.id, body=found.body, payload=found.payload)
    assert wire.parse_prefix(said, max_payload=MAX_PAYLOAD) == found


def hello(data: bytes) -> None:
    found = wire.parse_hello(data)
    assert wire.parse_hello(wire.encode_hello(found)[wire.PREFIX_BYTES :]) == found


def read(data: bytes) -> None:
    found = wire.parse_read(data)
    assert found.nbytes
    assert wire.parse_read(wire.encode_read(1, found)[wire.PREFIX_BYTES :]) == found


def grant(data: bytes) -> None:
    found = wire.parse_grant(data)
    assert found[1]
    assert wire.encode_grant(1, *found)[wire.PREFIX_BYTES :] == data


def fault(data: bytes) -> None:
    code, message = wire.parse_fault(data)
    said = wire.encode_fault(1, code, message)[wire.PREFIX_BYTES :]
    assert wire.parse_fault(said) == (code, message[: wire.MAX_MESSAGE])


def stage_message(data: bytes) -> None:
    after = 2 + int.from_bytes(data[:2], "big")
    header, payload = data[2:after], bytearray(data[after:])
    message, hidden, cause = activations.decode(memoryview(header), memoryview(payload))
    if hidden is not None:
        assert hidden.numel() * hidden.element_size() == len(payload)
    activations.encode(message, hidden, cause)


def examples() -> list[bytes]:
    """What is right, to begin with."""
    stage_messages: list[StageMessage] = [
        FORWARD,
        Admit(FORWARD.path, 1, "r1#1", 3, 9),
        Admitted(1, "r1#1"),
        Pull("tcp://h:1", 7),
        Sampled(5, (("r1#1", ()), ("r2#4", (99, 7)))),
        Free(("r1#1",)),
        Failed(("r1#1",), "capacity", "no room"),
    ]
    headers = [
        activations.encode(message, HIDDEN if message is FORWARD else None)[0]
        for message in stage_messages
    ]
    frames = [
        wire.encode_hello(wire.Hello(wire.Purpose.READS, 7, "tcp://h:1", {"shm": b"here"})),
        wire.encode_read(1, wire.ReadRequest(1, 0, 10, "m/1", True)),
        wire.encode_grant(1, Place(0, 4096), 100),
        wire.encode_fault(1, "region_unknown", "no such region"),
    ]
    bodies = [
        (PARSERS.index(parser), data[wire.PREFIX_BYTES :])
        for parser, data in zip((hello, read, grant, fault), frames, strict=True)
    ]
    bodies += [(0, data[: wire.PREFIX_BYTES]) for data in frames]
    for header in headers:
        said = len(header).to_bytes(2, "big") + header
        bodies.append((PARSERS.index(stage_message), said + bytes(96)))
        bodies.append((PARSERS.index(stage_message), said))
    return [bytes([parser]) + body for parser, body in bodies]


PARSERS = (prefix, hello, read, grant, fault, stage_message)


def parse(data: bytes) -> None:
    """The first byte says by which parser the others are read."""
    if len(data) < 2:
        return
    try:
        PARSERS[data[0] % len(PARSERS)](data[1:])
    except ProtocolViolation:
        return


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        for index, example in enumerate(examples()):
            (Path(directory) / str(index)).write_bytes(example)
        atheris.Setup([*sys.argv, directory], parse)
        atheris.Fuzz()
