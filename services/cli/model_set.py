"""`lambdascale model set`: what a published model is to have, and how commands say it."""

import argparse
import asyncio
from collections.abc import Mapping
from math import inf
from typing import Any

import msgspec

from services.cli.client import connect, print_json, say
from services.local.asking import ask
from shared import subjects
from shared.errors import BadInput
from shared.ids import ModelName
from shared.messages.pool import PLANNERS_CHOICE, Models, ModelSet
from shared.schedule import parse

SETTINGS = {
    "min_instances": "--min-instances",
    "max_instances": "--max-instances",
    "priority": "--priority",
    "keep_alive_s": "--keep-alive",
    "ttft_s": "--ttft-ms",
    "tpot_s": "--tpot-ms",
    "warm": "--warm",
    "schedule": "--schedule",
    "prefill_share": "--prefill-share",
}
"""The fields of ModelSet, and the options that set them."""
SET_DESCRIPTION = """\
Changes settings of a published model, at once and until they are changed again. Settings that are
not named stay as they are.

A schedule is a list of windows, with ';' between them, in UTC: days, times, and the numbers
that then replace --min-instances (min=N) and --warm (warm=N). Instances are there when their window
begins.
  lambdascale model set NAME --schedule "mon-fri 08:00-18:00 min=2; sat,sun 10:00-12:00 min=1"
  lambdascale model set NAME --schedule "daily 22:00-06:00 warm=2"      until 6 the next morning
Where windows overlap, the larger number counts. --schedule none removes it.
"""


def add_parser(actions: "argparse._SubParsersAction[Any]") -> argparse.ArgumentParser:
    change: argparse.ArgumentParser = actions.add_parser(
        "set",
        help="change a model's limits, objectives, schedule, priority or keep-alive",
        description=SET_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    change.add_argument("name", metavar="MODEL", help="the model's name")
    change.add_argument(
        "--min-instances",
        type=int,
        metavar="N",
        help="instances that the model keeps even when idle; 0 lets it sleep",
    )
    change.add_argument(
        "--max-instances",
        type=int,
        metavar="N",
        help="the most instances that the model may have; 0: as many as there are nodes",
    )
    change.add_argument(
        "--priority",
        type=int,
        metavar="P",
        help="models of higher priority get memory first when it is short (default: 0)",
    )
    change.add_argument(
        "--keep-alive",
        type=_seconds,
        metavar="SECONDS|default",
        dest="keep_alive_s",
        help="how long an instance stays after the load has ceased to need it; default: "
        "planner.idle_s",
    )
    change.add_argument(
        "--ttft-ms",
        type=_objective,
        metavar="MS|none",
        dest="ttft_s",
        help="objective: nine of ten requests get their first token within this time",
    )
    change.add_argument(
        "--tpot-ms",
        type=_objective,
        metavar="MS|none",
        dest="tpot_s",
        help="objective: the mean time between two tokens of a request",
    )
    change.add_argument(
        "--warm",
        type=int,
        metavar="N",
        help="copies that stay in memory when their instances are no longer needed (one copy "
        "always stays); they give way to models that have requests",
    )
    change.add_argument(
        "--schedule",
        type=_schedule,
        metavar="TEXT|none",
        help="windows of the week in which other numbers hold, see above",
    )
    change.add_argument(
        "--prefill-share",
        type=_share,
        metavar="SHARE|auto",
        help="the share of the instances that only prefill, while the others only decode, if there "
        "are at least two; 0: each does both; auto: as load and objectives have it (it takes "
        "--tpot-ms)",
    )
    change.set_defaults(run=lambda args: asyncio.run(_set(args)))
    return change


def _seconds(text: str) -> float:
    if text == "default":
        return -1.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is neither seconds nor 'default'")
    return seconds


def _share(text: str) -> float:
    try:
        share = PLANNERS_CHOICE if text == "auto" else float(text)
    except ValueError:
        share = 1.0
    if not (text == "auto" or 0 <= share < 1):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a share below 1 nor 'auto'")
    return share


def _objective(text: str) -> float:
    """Seconds; 0: none."""
    try:
        ms = 0.0 if text == "none" else float(text)
    except ValueError:
        ms = -1.0
    if not (text == "none" or 0 < ms < inf):
        raise argparse.ArgumentTypeError(f"{text!r} is neither milliseconds above 0 nor 'none'")
    return ms / 1000


def _schedule(text: str) -> str:
    text = "" if text == "none" else text.strip()
    try:
        parse(text)
    except BadInput as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


async def _set(args: argparse.Namespace) -> int:
    wishes = {name: getattr(args, name) for name in SETTINGS}
    if all(wish is None for wish in wishes.values()):
        raise BadInput(f"nothing to change: name one of {', '.join(SETTINGS.values())}")
    wish = ModelSet(name=ModelName(args.name), **wishes)
    async with connect(args) as bus:
        (record,) = (await ask(bus, subjects.REGISTRY_MODEL_SET, wish, Models)).records
    if args.json:
        print_json(record)
        return 0
    fixed = wanted(record.min_instances, record.max_instances, None)
    said = rules(msgspec.to_builtins(record))
    say(f"{record.name}: instances {fixed}{said and ', '}{said}")
    return 0


def wanted(least: int, most: int, fixed: int | None) -> str:
    """How many instances a model is to have, in words."""
    return f"{least} to {most or 'all nodes'}" if fixed is None else f"{fixed}, by hand"


def _roles(share: float) -> str:
    if share == PLANNERS_CHOICE:
        return "prefill apart if that is better"
    return f"{share:.0%} of instances prefill" if share else ""


def rules(record: Mapping[str, Any]) -> str:
    """What the model is to have besides numbers of instances, where it is not the default."""
    keep_alive_s = record["keep_alive_s"]
    parts: tuple[str | bool, ...] = (
        bool(record["priority"]) and f"priority {record['priority']}",
        bool(record["ttft_s"]) and f"TTFT {1000 * record['ttft_s']:g} ms",
        bool(record["tpot_s"]) and f"TPOT {1000 * record['tpot_s']:g} ms",
        bool(record["warm"]) and f"{record['warm']} warm",
        keep_alive_s is not None and f"keep-alive {keep_alive_s:g} s",
        str(record["schedule"]),
        _roles(record["prefill_share"]),
    )
    return ", ".join(str(part) for part in parts if part)
