"""What the commands about tenants and keys share: asking the registry, options and texts."""

import argparse

from services.cli.arguments import whole
from services.local.asking import ask
from shared import subjects
from shared.bus.base import Bus
from shared.messages.access import (
    AccessChange,
    AccessPage,
    AccessQuery,
    AccessRecord,
    ChangeAccess,
    Limits,
)

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


async def changed(bus: Bus, change: AccessChange) -> AccessRecord:
    """Has the registry make the change. Returns the record after it."""
    message = ChangeAccess(change=change)
    page = await ask(bus, subjects.REGISTRY_ACCESS_CHANGE, message, AccessPage)
    return page.records[0]


async def records(bus: Bus) -> list[AccessRecord]:
    """All tenants and keys."""
    found: dict[tuple[type, str], AccessRecord] = {}
    since, more = 0, True
    while more:
        page = await ask(bus, subjects.REGISTRY_ACCESS, AccessQuery(since=since), AccessPage)
        found |= {(type(record), record.id): record for record in page.records}
        since, more = page.revision, page.more
    return list(found.values())


def add_limit_options(parser: argparse.ArgumentParser, *, default: int | None) -> None:
    for option, text in (
        ("--requests-per-min", "calls in a minute"),
        ("--tokens-per-min", "tokens in a minute, of prompts and generated"),
        ("--concurrency", "completions at a time (a call with n=4 is four)"),
    ):
        parser.add_argument(
            option, type=whole, default=default, metavar="N", help=f"{text}; 0: no limit"
        )


def names(text: str) -> tuple[str, ...]:
    """A list with commas; `all`: empty."""
    return () if text == "all" else tuple(filter(None, text.split(",")))


def duration(text: str) -> float:
    """Seconds of a text such as 90d, 12h, 5m or 30s."""
    try:
        value = float(text[:-1]) * UNITS_S[text[-1:]]
    except (KeyError, ValueError):
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 90d, 12h, 5m or 30s")
    return value


def lasting_text(seconds: float) -> str:
    for unit, size in reversed(UNITS_S.items()):
        if seconds >= size:
            return f"{seconds / size:.3g}{unit}"
    return "0s"


def limits_text(limits: Limits) -> str:
    parts = []
    if limits.requests_per_min:
        parts.append(f"{limits.requests_per_min} requests/min")
    if limits.tokens_per_min:
        parts.append(f"{limits.tokens_per_min} tokens/min")
    if limits.concurrency:
        parts.append(f"{limits.concurrency} at a time")
    return ", ".join(parts) or "none"
