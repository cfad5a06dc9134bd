"""Who hears what a node reports: the controllers that it concerns, and nobody else."""

import pytest

from services.planner import serving
from services.planner.model import ModelController
from services.planner.service import PlannerService
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.config import PlannerConfig
from shared.ids import ModelName, NodeId
from shared.messages.pool import Holding, NodeGone, Tier
from tests.unit.registry.builders import MODEL, OTHER, holding, info, record, status

WHOLE = holding(Tier.GPU, 0, 1, 2, 3)


class Told:
    """A planner that nothing else talks to, with node a and two models."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.planner = PlannerService(MemoryBus(MemoryBroker(), "p"), PlannerConfig())
        self.planner._join(info("a"))
        self.planner._add(record("llama", MODEL))
        self.planner._add(record("other", OTHER))
        self._seq = 0
        on_status = ModelController.on_status

        def heard(controller: ModelController, node: NodeId) -> None:
            self.names.append(controller.record.name)
            on_status(controller, node)

        monkeypatch.setattr(ModelController, "on_status", heard)

    def report(self, *holdings: Holding, generation: int = 1) -> list[str]:
        self._seq += 1
        self.names.clear()
        said = status("a", *holdings, generation=generation, seq=self._seq)
        self.planner._learn_status(said)
        return sorted(self.names)

    def members(self, name: str = "llama") -> list[str]:
        return list(self.planner._models[ModelName(name)].serving.members)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


async def test_a_model_in_device_memory_concerns_its_controller(told: Told) -> None:
    assert told.report(WHOLE) == ["llama"]
    assert told.report(WHOLE) == ["llama"]
    assert told.report(WHOLE, holding(Tier.GPU, model_id=OTHER)) == ["llama", "other"]
    assert told.members() == ["a"]


async def test_copies_in_other_tiers_concern_nobody(told: Told) -> None:
    assert told.report(holding(Tier.DISK, 0), holding(Tier.HOST, 0, model_id=OTHER)) == []


async def test_a_model_that_nobody_knows_concerns_nobody(told: Told) -> None:
    told.planner._remove(ModelName("llama"))
    assert told.report(WHOLE) == []
    told.planner._add(record("llama", MODEL))
    assert told.members() == ["a"]
    assert told.report(WHOLE) == ["llama"]


async def test_a_member_concerns_its_controller_whatever_it_holds(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report that no longer tells of the model may be older than what it is said to hold."""
    told.report(WHOLE)
    assert told.report() == ["llama"]
    assert told.members() == ["a"]
    monkeypatch.setattr(serving, "REPUBLISH_S", 0.0)
    assert told.report() == ["llama"]
    assert told.members() == []
    assert told.report() == []


async def test_a_member_that_was_there_before_its_model_is_heard_of_too(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    told.planner._remove(ModelName("llama"))
    told.report(WHOLE)
    told.planner._add(record("llama", MODEL))
    monkeypatch.setattr(serving, "REPUBLISH_S", 0.0)
    assert told.report() == ["llama"]
    assert told.members() == []


async def test_a_node_that_is_gone_concerns_nobody(told: Told) -> None:
    told.report(WHOLE)
    gone = NodeGone(node=info("a").node, generation=info("a").generation, reason="")
    await told.planner._on_gone(gone)
    assert told.report(WHOLE) == []
    told.planner._join(info("a", generation=2))
    assert told.report(WHOLE, generation=2) == ["llama"]
