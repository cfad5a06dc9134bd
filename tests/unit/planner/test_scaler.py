"""KEDA's contract, as a client of it sees the planner."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from services.local.nats_servers import free_ports
from services.planner import scaler
from services.planner.scaler import Scaler
from shared import telemetry
from tests.support.keda import asking


class Said:
    """A log; `said` is its first warning."""

    def __init__(self) -> None:
        self.said: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def warning(self, event: str, **_: object) -> None:
        self.said.set_result(event)


@asynccontextmanager
async def serving(scales: Scaler, port: int) -> AsyncIterator[None]:
    log = telemetry.logger("planner")
    task = asyncio.ensure_future(scales.serve("127.0.0.1", port, log))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("wanted", [0, 1, 7])
async def test_as_many_nodes_as_are_wanted(wanted: int) -> None:
    port = free_ports(1)[0]
    async with serving(Scaler(lambda: wanted), port), asking(port) as keda:
        assert await keda.is_active() == (wanted > 0)
        (spec,) = (await keda.spec()).metricSpecs
        assert (spec.targetSize, spec.targetSizeFloat) == (1, 1.0)
        (value,) = (await keda.metrics(spec.metricName)).metricValues
        assert value.metricName == spec.metricName
        # Kubernetes divides the value by the target.
        assert value.metricValue / spec.targetSize == wanted
        assert value.metricValueFloat / spec.targetSizeFloat == wanted


async def test_another_metric_is_refused() -> None:
    port = free_ports(1)[0]
    async with serving(Scaler(lambda: 1), port), asking(port) as keda:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await keda.metrics("something else")
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "wanted_nodes" in (refused.value.details() or "")


async def test_a_stream_says_how_it_is_and_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaler, "LOOK_S", 0.01)
    port, wanted, looks, looked = free_ports(1)[0], 3, 0, asyncio.Event()

    def look() -> int:
        nonlocal looks
        looks += 1
        if looks == 5:
            looked.set()
        return wanted

    async with serving(Scaler(look), port), asking(port) as keda:
        said = aiter(keda.stream())
        assert await anext(said)
        await looked.wait()  # nothing new to say
        wanted = 0
        assert not await anext(said)
        wanted = 2
        assert await anext(said)


async def test_it_waits_for_the_port_of_a_planner_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scaler, "AGAIN_S", 0.01)
    port = free_ports(1)[0]
    async with serving(Scaler(lambda: 1), port):
        async with asking(port) as keda:
            assert await keda.is_active()
        log: Any = Said()
        later = asyncio.ensure_future(Scaler(lambda: 0).serve("127.0.0.1", port, log))
        assert "port cannot be had" in await log.said
    try:
        async with asking(port) as keda:
            assert not await keda.is_active()
    finally:
        later.cancel()
        with suppress(asyncio.CancelledError):
            await later
