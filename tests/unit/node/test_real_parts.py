"""What a node with these settings is made of."""

import shutil
from typing import Any, cast

import pytest
import torch

from services.node.engine.rehearsal import tried
from services.node.execution.worker import Worker
from services.node.memory.arena import Arena
from services.node.memory.device import DeviceArena
from services.node.memory.shelf import Shelf
from services.node.parts import WorkerListener
from services.node.real_parts import RealParts
from shared.config import NodeConfig
from shared.errors import ConfigError


class Listener:
    """Nobody, whatever is said."""

    kv = object()

    def __getattr__(self, name: str) -> Any:
        return None


def worker_on(arena: DeviceArena | None, **settings: Any) -> Worker:
    listener = cast(WorkerListener, Listener())
    memory = Arena(1 << 20).memory
    return RealParts(NodeConfig(**settings)).worker(memory, arena, Shelf(), listener)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.usefixtures("four_gpus")
def test_a_gpu_alone_has_an_arena_and_several_have_slices_of_the_hosts() -> None:
    memory = Arena(1 << 20).memory
    for degree in (1, "auto"):
        alone = RealParts(NodeConfig(device="cuda:1", tensor_parallel=degree))
        device = alone.device(memory)
        assert isinstance(device, DeviceArena)
        assert len(device._beside) == 2, "for KV that goes, and for KV that comes"
        worker = worker_on(device, device="cuda:1", tensor_parallel=degree)
        assert worker.staging == device.staging
        assert worker._kv_mover() is not None
    for settings in ({"device_direct": False}, {"kv_moves": "never"}):
        by_the_host = RealParts(NodeConfig(device="cuda:1", **settings)).device(memory)
        assert by_the_host is not None
        assert not by_the_host._beside
    assert RealParts(NodeConfig(device="cuda:1", tensor_parallel=3)).device(memory) is None
    worker = worker_on(None, device="cuda:1", tensor_parallel=3)
    assert worker.staging == "slices of the host arena"
    assert worker.pulse().broken == ""
    assert worker._kv_mover() is None  # since what one GPU has is a part of each position


@pytest.mark.usefixtures("four_gpus")
def test_what_several_gpus_cannot_do_is_said() -> None:
    few = (
        r"cuda:2 and node.tensor_parallel is 4, which takes cuda:2 to cuda:5, and this machine has "
        r"4 CUDA devices: lower node.tensor_parallel to 2 or less, or set node.device to cuda:0"
    )
    with pytest.raises(ConfigError, match=few):
        worker_on(None, device="cuda:2", tensor_parallel=4)
    with pytest.raises(ConfigError, match=r"takes cuda:0 to cuda:7, .* to 4 or less$"):
        worker_on(None, device="cuda", tensor_parallel=8)
    with pytest.raises(ConfigError, match=r"set node.kv_host_bytes to 0"):
        worker_on(None, device="cuda:0", tensor_parallel=2, kv_host_bytes=1)
    with pytest.raises(ConfigError, match=r"team_devices is 2, which takes node.device = cpu"):
        worker_on(None, device="cuda:0", tensor_parallel="auto", team_devices=2, threads=1)


@pytest.mark.parametrize(
    "settings", [{"tensor_parallel": 2, "threads": 2}, {"tensor_parallel": "auto"}, {"threads": 1}]
)
def test_devices_that_run_together_have_threads_of_their_own(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"team_devices is 2, .* and node.threads for this"):
        worker_on(None, team_devices=2, **settings)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_degrees_are_tried_up_to_the_number_of_threads() -> None:
    assert [tried(n, "packed") for n in (1, 2, 3, 7)] == [(), (2,), (2,), (2, 4)]
    assert tried(64, "int8") == (2, 4, 8)
    assert tried(64, "stored") == ()
