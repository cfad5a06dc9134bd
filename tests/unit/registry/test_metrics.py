"""What the registry shows at /metrics."""

import pytest

from services.registry.service import RegistryService
from shared import subjects
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.config import RegistryConfig
from shared.messages import Ok
from shared.messages.pool import ModelAdd, Reserve, Reserved, Tier
from tests.support.pages import page
from tests.unit.registry.builders import holding, info, record, reserve
from tests.unit.registry.cluster import WAIT_S, Node

pytestmark = pytest.mark.virtual_time


async def test_models_nodes_copies_and_reservations() -> None:
    broker = MemoryBroker()
    config = RegistryConfig(report_s=0.02, durable_copies=2)
    async with (
        MemoryBus(broker) as bus,
        MemoryBus(broker) as own,
        RegistryService(own, config) as registry,
    ):
        metrics = registry.metrics()
        await bus.request(
            subjects.REGISTRY_MODEL_ADD, ModelAdd(record=record()), Ok, timeout=WAIT_S
        )
        await Node(bus, info("a"), holding(Tier.DISK, 0, 1, 2, 3)).join()
        await Node(bus, info("b")).join()
        request: Reserve = reserve(count=1)
        await bus.request(subjects.REGISTRY_RESERVE, request, Reserved, timeout=WAIT_S)
        found = page(metrics)
        of_disk = f'{{model="{record().name}",tier="disk"}}'
        assert found["lambdascale_registry_models"] == 1
        assert found['lambdascale_registry_nodes{lease="standing"}'] == 2
        assert found["lambdascale_registry_reserved_nodes"] == 1
        assert found[f"lambdascale_registry_wanted_copies{of_disk}"] == 2
        assert found[f"lambdascale_registry_copies{of_disk}"] == 1
    assert page(metrics) == {}
