"""Fixtures of several test packages: buses, and a real nats-server to run them on."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import services.node.engine  # noqa: F401 - before the oracle's torch multiplies anything
from services.local.nats_server import NatsServer
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.nats import NatsBus
from shared.config import BusConfig

if not torch.cuda.is_available():  # Triton's interpreter, chosen before anything imports Triton
    os.environ["TRITON_INTERPRET"] = "1"

# Tests measure no time: a busy machine must not fail them.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A nats-server of this test alone, on a free port (it is up in some 15 ms)."""
    async with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def nats_bus(nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    async with NatsBus(BusConfig(url=nats_server.url), "test") as bus:
        yield bus


@pytest.fixture
async def memory_bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBus(MemoryBroker(), "test") as bus:
        yield bus
