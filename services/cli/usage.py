"""`lambdascale usage`: what tenants have used."""

import argparse
import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from services.cli.access import duration, lasting_text
from services.cli.client import add_cluster_options, add_json_option, connect, print_json
from services.cli.status_text import console, print_table
from shared import subjects
from shared.bus.base import Bus
from shared.clock import wall_ns
from shared.errors import BusError
from shared.usage import KEEP_S, MAX_BYTES, CallUsage, UsageBatch

DESCRIPTION = """\
Sums what tenants have used: calls, tokens, device time (seconds of a whole replica, shared by the
requests that ran beside each other) and memory for KV. Each gateway writes a record of every call
when it ends, within a second; a gateway that is killed loses the last second's.

Records are kept for 35 days.
"""


@dataclass(slots=True)
class Sum:
    calls: int = 0
    failed: int = 0
    """Calls that ended with an error."""
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    device_s: float = 0.0
    kv_gb_s: float = 0.0

    def add(self, call: CallUsage) -> None:
        self.calls += 1
        self.failed += call.status not in ("done", "cancelled")
        self.prompt += call.prompt
        self.cached += call.cached
        self.generated += call.generated
        self.device_s += call.device_s
        self.kv_gb_s += call.kv_gb_s


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "usage",
        help="sum what tenants have used",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tenant", metavar="TENANT", help="only this tenant, by its keys")
    parser.add_argument("--model", metavar="MODEL", help="only this model")
    parser.add_argument(
        "--since",
        type=duration,
        default="30d",
        metavar="TIME",
        help="how far back, such as 30d, 12h or 5m (default: %(default)s)",
    )
    add_cluster_options(parser)
    add_json_option(parser)
    parser.set_defaults(run=lambda args: asyncio.run(_run(args)))


async def _run(args: argparse.Namespace) -> int:
    since_ns = wall_ns() - round(args.since * 1e9)
    sums: dict[tuple[str, str, str], Sum] = defaultdict(Sum)
    async with connect(args) as bus:
        async for call in _calls(bus, since_ns):
            if args.tenant in (None, call.tenant) and args.model in (None, call.model):
                key = call.key if args.tenant else ""
                sums[call.tenant, key, call.model].add(call)
    rows = [
        {"tenant": tenant, **({"key": key} if args.tenant else {}), "model": model, **asdict(found)}
        for (tenant, key, model), found in sorted(sums.items())
    ]
    if args.json:
        print_json(rows)
        return 0
    for row in rows:
        row["device_s"], row["kv_gb_s"] = f"{row['device_s']:.1f}", f"{row['kv_gb_s']:.3f}"
    print_table(console(), f"used in the last {lasting_text(args.since)}", rows)
    return 0


async def _calls(bus: Bus, since_ns: int) -> AsyncIterator[CallUsage]:
    log = await bus.open_log(subjects.LOG_USAGE, keep_s=KEEP_S, max_bytes=MAX_BYTES)
    async for entry in log.since(since_ns):
        try:
            batch = msgspec.msgpack.decode(entry, type=UsageBatch)
        except msgspec.MsgspecError as error:
            raise BusError(f"a record of usage cannot be read: {error}") from error
        for call in batch.calls:
            if call.ended_ns >= since_ns:
                yield call
