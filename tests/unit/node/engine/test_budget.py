"""What KV caches may take, from the memory that there is."""

from typing import Any

import pytest
import torch

from services.node.checkpoints.config import ModelConfig
from services.node.core.kv import PAGE
from services.node.engine import budget
from services.node.engine.budget import KvBudget, kv_budget
from services.node.engine.engine import TorchEngine
from services.node.memory.available import HostMemory
from shared.config import NodeConfig
from shared.errors import CapacityExceeded
from shared.ids import ModelId
from tests.unit.node.engine.models import MODEL, make_model

CPU = torch.device("cpu")


def config(**settings: Any) -> NodeConfig:
    return NodeConfig(**{"cpu_weights": "stored", "arena_bytes": 70, **settings})


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 bytes are left of 1000."""
    monkeypatch.setattr(budget, "host_memory", lambda: HostMemory(500, 1000))


def test_by_itself_it_is_what_is_left_less_a_tenth_of_all() -> None:
    assert kv_budget(config(), CPU) == KvBudget(400, 70)
    assert kv_budget(config(kv_share=0.25), CPU).nbytes == 100


def test_the_copies_of_weights_that_a_cpu_makes_are_left_room() -> None:
    assert kv_budget(config(cpu_weights="packed"), CPU).nbytes == 330
    assert kv_budget(config(cpu_weights="int8"), CPU).nbytes == 365


def test_what_is_asked_for_is_had_or_refused() -> None:
    assert kv_budget(config(kv_bytes=500), CPU).nbytes == 500
    with pytest.raises(CapacityExceeded, match=r"kv_bytes is 501, and 500 bytes are left"):
        kv_budget(config(kv_bytes=501), CPU)


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "host_memory", lambda: HostMemory(100, 1000))
    with pytest.raises(CapacityExceeded, match=r"100 bytes are left .* lower node\.arena_bytes"):
        kv_budget(config(), CPU)


def test_a_model_has_as_much_of_it_as_of_the_arena() -> None:
    kv = KvBudget(80 * PAGE, arena_bytes=1000)
    assert kv.positions(weights=500, position=4) == 10 * PAGE
    assert kv.positions(weights=510, position=4) == 10 * PAGE
    assert kv.positions(weights=5000, position=4) == 20 * PAGE
    with pytest.raises(CapacityExceeded, match=r"raise node\.kv_bytes"):
        kv.positions(weights=500, position=41)


OTHER = ModelId("other")


def test_the_first_model_decides_and_all_stay_within_the_budget() -> None:
    small, large = make_model(num_hidden_layers=2), make_model(num_hidden_layers=5)
    config = ModelConfig.from_hf(small.manifest.config)
    layer = PAGE * 2 * config.n_kv_heads * config.head_dim * 4
    weights, more = (sum(b.nbytes for b in m.manifest.blocks) for m in (small, large))
    kv = KvBudget(14 * layer, arena_bytes=2 * weights)
    engine = TorchEngine("cpu", kv, threads=1)
    assert engine.kv_capacity == 0
    engine.open_model(MODEL, small.manifest)
    assert engine.kv_capacity == 3 * PAGE  # 7 of the 14, at 2 a page
    with pytest.raises(CapacityExceeded, match=r"other models leave .* raise node\.kv_bytes"):
        engine.open_model(OTHER, large.manifest)
    assert engine.held(OTHER) == frozenset()
    engine.open_model(OTHER, small.manifest)
    engine.close_model(MODEL)
    engine.close_model(OTHER)
    engine.open_model(OTHER, large.manifest)
    assert engine.kv_capacity == kv.positions(more, 5 * layer // PAGE) > 0
