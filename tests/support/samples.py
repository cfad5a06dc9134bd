"""Samples: one of each thing that processes say to each other or store, as a release wrote it.

`tests/data/messages.json` keeps them in the bytes of the wire. `wire_form.json` says which types
the last release had; a sample says what its encoder made of one. `python -m tests.support.samples`
adds those that are missing, and changes none: a sample goes only when nobody has to read it any
more.
"""

import base64
import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
from msgspec import inspect

from services.node.transport import wire
from services.node.transport.direct import Place
from shared.version import __version__
from tests.support.wire_form import ROOTS

FILE = Path(__file__).parents[1] / "data" / "messages.json"


class Frame(NamedTuple):
    """A frame of the data plane."""

    sent: bytes
    read: Callable[[bytes], object]
    """What the receiver makes of the body and the payload."""
    said: object


HELLO = wire.Hello(
    purpose=wire.Purpose.READS,
    instance=2**63 + 1,
    address="host.example:7001",
    ways={"shm": b"offer", "rdma": b""},
    nonce=b"nonce",
    proof=b"proof",
    asks=True,
)
READ = wire.ReadRequest(-3, 2**40, 2**20, "weights/model-1", direct=True)
FRAMES = {
    wire.Kind.HELLO: Frame(wire.encode_hello(HELLO), wire.parse_hello, HELLO),
    wire.Kind.READ: Frame(wire.encode_read(7, READ), wire.parse_read, READ),
    wire.Kind.GRANT: Frame(
        wire.encode_grant(7, Place(3, 2**50), 4096), wire.parse_grant, (Place(3, 2**50), 4096)
    ),
    wire.Kind.FAULT: Frame(
        wire.encode_fault(7, "cancelled", "näh"), wire.parse_fault, ("cancelled", "näh")
    ),
    wire.Kind.CHALLENGE: Frame(wire.encode_challenge(b"nonce"), bytes, b"nonce"),
    wire.Kind.PERMIT: Frame(wire.encode_permit(b"permit"), bytes, b"permit"),
    wire.Kind.CANCEL: Frame(wire.encode_prefix(wire.Kind.CANCEL, id=7), bytes, b""),
    wire.Kind.TAKEN: Frame(wire.encode_prefix(wire.Kind.TAKEN, id=7), bytes, b""),
    wire.Kind.HEARTBEAT: Frame(wire.encode_prefix(wire.Kind.HEARTBEAT), bytes, b""),
    wire.Kind.DATA: Frame(
        wire.encode_prefix(wire.Kind.DATA, id=7, payload=4) + b"data", bytes, b"data"
    ),
    wire.Kind.MESSAGE: Frame(
        wire.encode_prefix(wire.Kind.MESSAGE, body=4, payload=4) + b"bodydata", bytes, b"bodydata"
    ),
}


def kinds() -> Iterator[tuple[str, Any]]:
    """Name and type of everything that has to have a sample, but frames."""
    for name, kind in ROOTS.items():
        members = get_args(kind) or (kind,)
        for member in members:
            yield (name if len(members) == 1 else f"{name} {member.__name__}"), member


def name_of(frame: wire.Kind) -> str:
    return f"frame {frame.name}"


def recorded() -> dict[str, bytes]:
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    return {name: base64.b64decode(sample["bytes"]) for name, sample in found.items()}


def sample(kind: Any) -> bytes:
    """All fields are there, each with a value of its own."""
    value = _value(inspect.type_info(kind), "", count(1))
    return msgspec.msgpack.encode(msgspec.convert(value, kind, builtin_types=(bytes,)))


def _value(info: inspect.Type, name: str, numbers: Iterator[int]) -> Any:
    match info:
        case inspect.StructType():
            fields = {
                field.encode_name: field.default
                if field.name == "v"  # the version, which says what is understood
                else _value(field.type, field.name, numbers)
                for field in info.fields
            }
            if info.array_like:
                return [*([] if info.tag is None else [info.tag]), *fields.values()]
            return fields if info.tag_field is None else fields | {info.tag_field: info.tag}
        case inspect.UnionType():
            rest = [each for each in info.types if not isinstance(each, inspect.NoneType)]
            return _value(rest[0], name, numbers)
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType():
            return [_value(info.item_type, name, numbers)]
        case inspect.TupleType():
            return [_value(each, name, numbers) for each in info.item_types]
        case inspect.DictType():
            key = _value(info.key_type, f"{name} key", numbers)
            return {key: _value(info.value_type, name, numbers)}
        case inspect.EnumType():
            return list(info.cls)[-1].value
        case inspect.LiteralType():
            return info.values[-1]
        case inspect.IntType():
            return next(numbers)
        case inspect.FloatType():
            return next(numbers) + 0.5
        case inspect.BoolType():
            return True
        case inspect.BytesType():
            return f"{name} ü".encode()
        case inspect.AnyType():
            return {"any": [next(numbers), None]}
        case _:
            assert isinstance(info, inspect.StrType), f"{info} has no sample yet"
            return f"{name} ü"


def main() -> None:
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    made = {name: sample(kind) for name, kind in kinds()}
    made |= {name_of(kind): frame.sent for kind, frame in FRAMES.items()}
    for name in made.keys() - found.keys():
        text = base64.b64encode(made[name]).decode()
        found[name] = {"release": __version__, "bytes": text}
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
