"""What a node with these settings is made of."""

import shutil
from typing import Any, cast

import pytest

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

    def __getattr__(self, name: str) -> Any:
        return None


def worker_on(arena: DeviceArena | None, **settings: Any) -> Worker:
    listener = cast(WorkerListener, Listener())
    memory = Arena(1 << 20).memory
    return RealParts(NodeConfig(**settings)).worker(memory, arena, Shelf(), listener)


def test_a_gpu_takes_no_ranks() -> None:
    gpu = cast(DeviceArena, object())
    with pytest.raises(ConfigError, match=r"is 2, and on cuda:0 it can only be 1 or auto"):
        worker_on(gpu, device="cuda:0", tensor_parallel=2)
    assert worker_on(gpu, device="cuda:0", tensor_parallel="auto").pulse().broken == ""


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
