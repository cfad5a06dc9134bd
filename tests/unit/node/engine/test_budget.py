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
    assert kv_budget(config(), CPU) == KvBudget(400)
    assert kv_budget(config(kv_share=0.25), CPU).nbytes == 100


def test_the_copies_of_weights_that_a_cpu_makes_are_left_room() -> None:
    assert kv_budget(config(cpu_weights="packed"), CPU).nbytes == 330
    assert kv_budget(config(cpu_weights="int8"), CPU).nbytes == 365


def test_weights_that_come_to_a_gpu_later_are_left_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU has its whole arena already; of several, each gets slices as blocks come."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (500, 1000))
    gpu = torch.device("cuda:0")
    assert kv_budget(config(), gpu).nbytes == 400
    assert kv_budget(config(tensor_parallel="auto"), gpu).nbytes == 400
    assert kv_budget(config(tensor_parallel=3), gpu).nbytes == 400 - 24
    with pytest.raises(CapacityExceeded, match="beside its share of the arena, 24 bytes"):
        kv_budget(config(tensor_parallel=3, kv_bytes=477), gpu)


def test_what_is_asked_for_is_had_or_refused() -> None:
    assert kv_budget(config(kv_bytes=500), CPU).nbytes == 500
    with pytest.raises(CapacityExceeded, match=r"kv_bytes is 501, and 500 bytes are left"):
        kv_budget(config(kv_bytes=501), CPU)


def test_the_host_tier_has_memory_of_its_own() -> None:
    assert kv_budget(config(kv_host_bytes=100), CPU).nbytes == 300
    with pytest.raises(CapacityExceeded, match=r"400 bytes are left .* node\.kv_host_bytes"):
        kv_budget(config(kv_host_bytes=100, kv_bytes=401), CPU)
    with pytest.raises(CapacityExceeded, match=r"501, and 500 .* lower node\.kv_host_bytes"):
        kv_budget(config(kv_host_bytes=501), CPU)


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "host_memory", lambda: HostMemory(100, 1000))
    with pytest.raises(CapacityExceeded, match=r"100 bytes are left .* lower node\.arena_bytes"):
        kv_budget(config(), CPU)


def test_it_is_divided_in_whole_pages_of_the_first_model() -> None:
    assert KvBudget(99).slabs(10) == (2, 40)
    assert KvBudget(10).slabs(10) == (1, 10)
    assert KvBudget(64_000).slabs(10) == (64, 1000)
    with pytest.raises(CapacityExceeded, match=r"raise node\.kv_bytes"):
        KvBudget(9).slabs(10)


OTHER = ModelId("other")


def test_models_share_it_by_the_size_of_their_weights() -> None:
    small, large = make_model(num_hidden_layers=2), make_model(num_hidden_layers=5)
    config = ModelConfig.from_hf(small.manifest.config)
    layer = PAGE * 2 * config.n_kv_heads * config.head_dim * 4
    engine = TorchEngine("cpu", KvBudget(4000 * layer), threads=1)
    assert engine.kv_capacity == engine.kv_share(MODEL) == 0
    engine.open_model(MODEL, small.manifest)
    assert engine.kv_capacity == engine.kv_share(MODEL) == 62 * 32 * PAGE
    engine.open_model(OTHER, large.manifest)
    taken = 2 * engine.kv_share(MODEL) + 5 * engine.kv_share(OTHER)
    assert 3600 * PAGE < taken <= 4000 * PAGE
    assert engine.kv_free(MODEL, {}) > engine.kv_share(MODEL) > 0
    engine.close_model(MODEL)
    assert engine.kv_share(OTHER) == 62 * 12 * PAGE
    engine.close_model(OTHER)
    assert engine.kv_capacity == 0
