"""KV on its way from prefill to decode, on modelled H800 devices in virtual time: see
`benchmarks.handover`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks import roles
from services.gateway.core import moves
from services.node.core.handover import Takings
from services.node.core.leading import Leader
from shared import telemetry
from shared.clock import now
from shared.config import TelemetryConfig
from shared.ids import RequestId

PROMPT, OUTPUT, RATE, SHARE = 2048, 64, 8.0, 0.5
SECONDS, KNOWN_S = 8.0, 2.0
"""The length of a run, and of its beginning, in which gateways do not know yet how long prefills
take."""
BAR = 0.10
"""The most time that a handover may add, as a share of the prefill's."""


@dataclass
class Times:
    """When each request's prefill began and ended, and when the other node had its KV."""

    began: dict[RequestId, float] = field(default_factory=dict)
    ended: dict[RequestId, float] = field(default_factory=dict)
    there: dict[RequestId, float] = field(default_factory=dict)

    def late(self) -> list[tuple[float, float]]:
        """(prefill, from its end until the KV was there), in seconds."""
        start = min(self.began.values()) + KNOWN_S
        return [
            (self.ended[r] - self.began[r], max(0.0, there - self.ended[r]))
            for r, there in self.there.items()
            if r in self.ended and self.began.get(r, 0.0) > start
        ]


@contextmanager
def _watched(times: Times) -> Iterator[None]:
    """Notes what the nodes' schedulers do."""
    begin, sampled, ask = Leader._begin, Leader.sampled, Takings._yield

    def on_begin(self: Leader, sequence: Any, tick: int) -> None:
        times.began.setdefault(sequence.submit.request, now())
        begin(self, sequence, tick)

    def on_sampled(self: Leader, message: Any, tick: int) -> Any:
        for key, _ in message.tokens:
            if sequence := self.led.running.get(key):
                times.ended.setdefault(sequence.submit.request, now())
        return sampled(self, message, tick)

    def on_there(self: Takings, taking: Any) -> Any:
        if taking.end:  # KV was asked for
            times.there.setdefault(taking.sequence.submit.request, now())
        return ask(self, taking)

    with (
        patch.object(Leader, "_begin", on_begin),
        patch.object(Leader, "sampled", on_sampled),
        patch.object(Takings, "_yield", on_there),
    ):
        yield


def measure(*, early: bool) -> list[tuple[float, float]]:
    times = Times()
    load = roles.Load(PROMPT, OUTPUT, (RATE,), 0.020)
    with _watched(times), patch.object(moves, "LATE_S", moves.LATE_S if early else 0.0):
        roles.simulate(load, RATE, SHARE, 0, SECONDS)
    return times.late()


def report() -> bool:
    """Prints what it costs to hand the KV of a prompt over. Returns whether the bar is met."""
    telemetry.configure("simulation", TelemetryConfig(log_level="off"))
    print(
        f"virtual time: {roles.ARCHITECTURE} on {roles.HARDWARE}, prompts of {PROMPT} tokens, "
        f"{RATE:g}/s, medians"
    )
    met = False
    for early, said in ((False, "after the first token"), (True, "while the prompt runs")):
        found = measure(early=early)
        prefill, late = (median(column) for column in zip(*found, strict=True))
        met = late / prefill <= BAR
        print(
            f"  KV goes {said:<22} prefill {prefill * 1e3:6.1f} ms, KV there "
            f"{late * 1e3:5.1f} ms after it: {late / prefill:6.1%}"
        )
    print(f"  bar: {BAR:.0%} at most: {'met' if met else 'NOT met'}")
    return met
