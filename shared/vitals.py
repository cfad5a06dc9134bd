"""What every process shows of itself, whatever its role."""

import asyncio
import sys

from shared.bus.nats import NatsBus
from shared.clock import now
from shared.metrics import Metrics
from shared.service import Service
from shared.version import __version__

LOOK_S = 0.1
"""Seconds between looks at how late the event loop is."""
LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Vitals:
    def __init__(self, metrics: Metrics, service: Service, bus: NatsBus) -> None:
        """Adds them to what the service shows of its own. `bus`: what it is connected by."""
        python = ".".join(map(str, sys.version_info[:3]))
        build = (service.role, service.name, __version__, python)
        metrics.watch(
            "gauge", "lambdascale_build_info", "Always 1: the labels say what runs here",
            "role", "name", "version", "python",
            read=lambda: [(build, 1)],
        )  # fmt: skip
        metrics.watch(
            "gauge", "lambdascale_ready", "Whether the service is open and not about to end",
            read=lambda: [((), service.ready)],
        )  # fmt: skip
        metrics.watch(
            "gauge", "lambdascale_standby", "Whether it waits until it is the active process",
            read=lambda: [((), service.stands_by)],
        )  # fmt: skip
        metrics.watch(
            "gauge", "lambdascale_term", "The term of an active planner or registry; 0: none",
            read=lambda: [((), service.term)],
        )  # fmt: skip
        metrics.watch(
            "counter", "lambdascale_failures_total", "Bugs that ended a piece of work: see the log",
            read=lambda: [((), service.failures)],
        )  # fmt: skip
        metrics.watch(
            "gauge", "lambdascale_bus_connected", "Whether NATS is connected",
            read=lambda: [((), bus.is_up)],
        )  # fmt: skip
        metrics.watch(
            "counter", "lambdascale_bus_refused_messages_total",
            "Messages not taken: malformed, of a kind without a handler (ignored), failed in the "
            "handler, dropped as it was too slow, or of an earlier term (stale)",
            "reason",
            read=lambda: [
                (("malformed",), bus.rejected),
                (("ignored",), bus.ignored),
                (("failed",), bus.failed),
                (("dropped",), bus.dropped),
                (("stale",), bus.stale),
            ],
        )  # fmt: skip
        self._lag = metrics.histogram(
            "lambdascale_event_loop_lag_seconds",
            "How much later than asked for the event loop runs a timer",
            buckets=LAGS,
        )
        metrics.include_process()

    async def watch_loop(self) -> None:
        """Measures how late the loop is, for as long as it runs."""
        while True:
            due = now() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self._lag.observe(max(0.0, now() - due))
