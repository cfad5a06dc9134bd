"""The endpoint of a process for probes and for Prometheus."""

import aiohttp
import pytest

from services.local.nats_servers import free_ports
from shared import telemetry
from shared.errors import ConfigError
from shared.metrics import Metrics
from shared.monitor import monitoring

LOG = telemetry.logger("test")
HOST = "127.0.0.1"


async def get(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as client, client.get(f"http://{HOST}:{port}{path}") as got:
        return got.status, await got.text()


async def test_what_it_answers() -> None:
    port, wrong, metrics = free_ports(1)[0], ["no bus"], Metrics()
    metrics.counter("asked_total", "text").inc(2)
    async with monitoring(HOST, port, metrics, lambda: wrong[0], LOG):
        assert await get(port, "/live") == (200, "ok")
        assert await get(port, "/ready") == (503, "no bus")
        wrong[0] = ""
        assert await get(port, "/ready") == (200, "ok")
        status, page = await get(port, "/metrics")
        assert status == 200
        assert "asked_total 2.0" in page.splitlines()
        assert (await get(port, "/other"))[0] == 404


async def test_a_standby_has_the_port_once_the_active_process_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shared.monitor.AGAIN_S", 0.01)
    port = free_ports(1)[0]
    first = monitoring(HOST, port, Metrics(), lambda: "first", LOG)
    await first.__aenter__()
    async with monitoring(HOST, port, Metrics(), lambda: "second", LOG):
        assert await get(port, "/ready") == (503, "first")
        await first.__aexit__(None, None, None)
        while True:
            try:
                assert await get(port, "/ready") == (503, "second")
                break
            except aiohttp.ClientError:
                continue


async def test_an_address_of_no_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.metrics_host"):
        async with monitoring("192.0.2.1", free_ports(1)[0], Metrics(), lambda: "", LOG):
            pass
