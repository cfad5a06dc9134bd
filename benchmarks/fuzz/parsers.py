"""Everything in this process that reads bytes or files of others: each returns, or raises the error
that it documents."""

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.fuzz.report import Report
from benchmarks.fuzz.values import Source
from services.gateway.core.keyed_record import Record
from services.node.checkpoints.architecture import read_config
from services.node.checkpoints.safetensors_header import read_header
from services.node.core.microbatches import Admit, Admitted, Failed, Forward, Free, Pull, Sampled
from services.node.execution import activations
from services.node.keeper import messages as keeper
from services.node.transport import rdma_endpoint, wire
from services.node.transport.rdma_endpoint import Endpoint
from services.planner.core.rhythm import History
from services.planner.store import Store as PlannerStore
from services.registry.core.duties import NodeDuty
from services.registry.core.reservations import Reservation
from services.registry.store import Store as RegistryStore
from shared import config, subjects, telemetry
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.capabilities import Claims, Signer, Signers
from shared.confined import jobs
from shared.election.lease import LeaseRecord
from shared.errors import (
    BadMessage,
    CorruptCheckpoint,
    LambdaScaleError,
    ModelError,
    ProtocolViolation,
    ReadRefused,
)
from shared.layout import Manifest, decode_manifest
from shared.messages import KINDS, decode
from shared.messages.pool import ModelRecord, NodeInfo
from shared.messages.scaling import EventRecord

MAX_PAYLOAD = 1 << 20
STAGE_MESSAGES = Admit | Admitted | Forward | Pull | Sampled | Free | Failed
PLANNER = Signer("planner", b"p" * 32)
"""Signs some of the capabilities, so that what they say is read, too."""
SIGNERS = Signers({"planner": PLANNER.public_half})
CONFIG = {  # the fields of a Llama's config.json, with values that work
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 320, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 1e4, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float32",
    "eos_token_id": [1, 2], "bos_token_id": 0, "attention_bias": False, "sliding_window": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parser:
    name: str
    draw: Callable[[Source], bytes]
    read: Callable[[bytes], object]
    may_raise: tuple[type[Exception], ...]


def _of(kind: Any) -> Callable[[Source], bytes]:
    return lambda source: source.packed(source.value(kind))


def _json_of(kind: Any) -> Callable[[Source], bytes]:
    return lambda source: source.json(source.value(kind))


def _message(source: Source) -> bytes:
    return source.packed(source.value(source.random.choice(KINDS)))


def _prefix(source: Source) -> bytes:
    kind = source.random.randrange(14)
    sizes = (0, 1, 24, 1 << 16, 1 << 31)
    body, payload = source.random.choice(sizes), source.random.choice((*sizes, 1 << 40))
    data = b"%c\0\0\0" % kind + source.random.randrange(3).to_bytes(4) + body.to_bytes(4)
    return (data + payload.to_bytes(8))[: wire.PREFIX_BYTES + source.random.choice((0, 0, 0, -1))]


def _read_prefix(data: bytes) -> object:
    return wire.parse_prefix(data, max_payload=MAX_PAYLOAD)


def _hello(source: Source) -> bytes:
    version = source.random.choice((wire.VERSION, wire.VERSION, wire.OLDEST, 0, 9))
    return wire.MAGIC + version.to_bytes(2) + source.packed(source.value(wire.Hello))


def _read(source: Source) -> bytes:
    return source.random.randbytes(21) + source.text().encode()


def _grant(source: Source) -> bytes:
    return source.random.randbytes(source.random.choice((20, 20, 20, 19)))


def _fault(source: Source) -> bytes:
    return source.damaged(f"{source.text()}\0{source.text()}".encode())


def stage_message(source: Source) -> bytes:
    header = {
        "v": activations.VERSION if source.chance(0.95) else source.odd(),
        "message": source.value(STAGE_MESSAGES),
        "dtype": source.random.choice(("float32", "bfloat16", "", "int7")),
        "hidden_size": source.random.choice((0, 1, 24, 2**40)),
    }
    data = source.packed(header)
    return len(data).to_bytes(4) + data + bytes(source.random.choice((0, 4, 96, 1000)))


def _read_stage_message(data: bytes) -> object:
    after = 4 + int.from_bytes(data[:4])
    return activations.decode(memoryview(data)[4:after], memoryview(bytearray(data[after:])))


def _capability(source: Source) -> bytes:
    if source.chance(0.5):
        claims = source.value(Claims, odd=0.0)
        return PLANNER.sign(claims[1], claims[2], [1, 2, 5], claims[4])
    return source.packed([source.packed(source.value(Claims)), source.random.randbytes(64)])


def _toml(source: Source) -> bytes:
    """Tables of the configuration, with keys that are there and some that are not."""
    lines = []
    drawn = source.value(config.Config)
    for table, values in drawn.items() if isinstance(drawn, dict) else ():
        lines.append(f"[{table}]")
        if isinstance(values, dict):
            lines += [f"{key} = {_toml_value(value)}" for key, value in values.items()]
    data = "\n".join(lines).encode(errors="replace")
    return source.damaged(data) if source.chance(0.2) else data


def _toml_value(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case list():
            return "[" + ", ".join(map(_toml_value, value)) + "]"
        case _:
            return msgspec.json.encode(str(value).replace("\x7f", "")).decode()


def _config_json(source: Source) -> bytes:
    value = {key: each for key, each in CONFIG.items() if source.chance(0.95)}
    for key in source.random.sample(sorted(CONFIG), source.random.choice((0, 1, 1, 2, 3))):
        value[key] = source.odd()
    return source.json(value)


def _read_config_json(data: bytes) -> object:
    return read_config(msgspec.json.decode(data))


def _safetensors(source: Source) -> bytes:
    dtypes = ("F32", "BF16", "F16", "I64", "X9", 7)
    entries: dict[str, object] = {}
    position = 0
    for _ in range(source.random.choice((0, 1, 2, 4))):
        shape = [source.random.choice((1, 2, 3)) for _ in range(source.random.choice((0, 1, 2)))]
        size = 4
        for each in shape:
            size *= each
        entries[source.text()] = {
            "dtype": source.random.choice(dtypes) if source.chance(0.3) else "F32",
            "shape": shape if source.chance(0.9) else source.odd(),
            "data_offsets": [position, position + size] if source.chance(0.9) else source.odd(),
        }
        position += size
    if source.chance(0.3):
        entries["__metadata__"] = {"format": "pt"} if source.chance(0.5) else source.odd()
    header = source.json(entries)
    length = len(header) if source.chance(0.9) else source.random.choice((0, 1 << 20, 2**64 - 1))
    return length.to_bytes(8, "little") + header + bytes(position)


_SCHEMA = (msgspec.MsgspecError, UnicodeDecodeError)
PARSERS = (
    Parser("message", _message, decode, (BadMessage,)),
    Parser("frame prefix", _prefix, _read_prefix, (ProtocolViolation,)),
    Parser("HELLO", _hello, wire.parse_hello, (ProtocolViolation,)),
    Parser("READ", _read, wire.parse_read, (ProtocolViolation,)),
    Parser("GRANT", _grant, wire.parse_grant, (ProtocolViolation,)),
    Parser("FAULT", _fault, wire.parse_fault, (ProtocolViolation,)),
    Parser("stage message", stage_message, _read_stage_message, (ProtocolViolation,)),
    Parser("capability", _capability, SIGNERS.claims_of, (ReadRefused,)),
    Parser("RDMA endpoint", _of(Endpoint), rdma_endpoint.decode, (ProtocolViolation,)),
    Parser("manifest", _of(Manifest), decode_manifest, (CorruptCheckpoint,)),
    Parser("keeper's question", _json_of(keeper.Asked), keeper.decode_asked, _SCHEMA),
    Parser("keeper's answer", _json_of(keeper.Told), keeper.decode_told, _SCHEMA),
    Parser("confined job", _of(jobs.Job), jobs.decode_job, _SCHEMA),
    Parser("config.json", _config_json, _read_config_json, (ModelError, *_SCHEMA, RecursionError)),
)


def in_a_file(directory: Path) -> tuple[Parser, ...]:
    """Those that read a file."""
    path = directory / "file"

    def from_file(read: Callable[[Path], object]) -> Callable[[bytes], object]:
        def read_it(data: bytes) -> object:
            path.write_bytes(data)
            return read(path)

        return read_it

    return (
        Parser("TOML", _toml, from_file(lambda p: config.load(p, {})), (LambdaScaleError,)),
        Parser("safetensors", _safetensors, from_file(read_header), (LambdaScaleError,)),
    )


STORED: dict[str, Any] = {
    subjects.KV_EVENTS: EventRecord,
    subjects.KV_SCALE: int,
    subjects.KV_RHYTHMS: History,
    subjects.KV_MODELS: ModelRecord,
    subjects.KV_NODES: NodeInfo,
    subjects.KV_DUTIES: NodeDuty,
    subjects.KV_RESERVATIONS: Reservation,
    subjects.KV_ANSWERS: Record,
    subjects.KV_ACTIVE: LeaseRecord,
}
"""What each bucket holds."""


async def read_store(source: Source, inputs: int, report: Report) -> None:
    """Planner and registry start with buckets in which there is anything."""
    log = telemetry.logger("fuzz")
    for _ in range(max(1, inputs // 50)):
        bus = MemoryBus(MemoryBroker(), "fuzz")
        async with bus:
            example = b""
            for bucket, kind in STORED.items():
                values = await bus.kv(bucket)
                for number in range(6):
                    example = source.packed(source.value(kind))
                    await values.put(f"k{number}", example)
            for store in (PlannerStore(bus, log), RegistryStore(bus, log)):
                try:
                    await store.load()
                except Exception as error:  # what is looked for
                    report.caught(f"store of {type(store).__module__}", error, example)
            for _ in range(6 * len(STORED)):
                report.ended("stored values", "read")


def run(seed: int, inputs: int, report: Report) -> None:
    """Tries so many inputs, evenly over all parsers."""
    with tempfile.TemporaryDirectory() as directory:
        parsers = (*PARSERS, *in_a_file(Path(directory)))
        share = max(1, inputs // (len(parsers) + 1))
        for parser in parsers:
            source = Source(f"{parser.name} {seed}")
            for _ in range(share):
                data = parser.draw(source)
                try:
                    parser.read(data)
                except parser.may_raise as error:
                    report.ended(parser.name, type(error).__name__)
                except Exception as error:  # what is looked for
                    report.caught(parser.name, error, data)
                    report.ended(parser.name, "FOUND")
                else:
                    report.ended(parser.name, "read")
    asyncio.run(read_store(Source(f"store {seed}"), share, report))
