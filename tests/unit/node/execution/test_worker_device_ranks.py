"""Engine threads whose engines run on several devices each (CPUs here, by gloo)."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from services.node.core.kv import PAGE
from services.node.engine.device_ranks import DeviceRanks
from services.node.engine.engine import TorchEngine
from services.node.memory.arena import Arena
from shared.errors import EngineFailed
from tests.support.submits import TWO, WHOLE, submit
from tests.support.worker_cluster import cluster
from tests.unit.node.engine.models import make_model

CPU = torch.device("cpu")
COUNT = 60
PROMPTS = [tuple(range(i, i + 20)) for i in range(3)]


@pytest.fixture
def both() -> Iterator[dict[str, DeviceRanks]]:
    """The ranks of two nodes, which share an arena."""
    arena = Arena(1 << 20)
    made = {name: DeviceRanks([CPU] * 2, arena.memory) for name in ("a", "b")}
    yield made
    for ranks in made.values():
        ranks.close()


async def test_paths_preemption_and_speculation_and_then_a_rank_is_killed(
    both: dict[str, DeviceRanks],
) -> None:
    model, left = make_model(), list(both.values())
    arena = left[0]._arena.view
    buffers, at = list[memoryview](), 0
    for buffer in model.buffers:
        buffers.append(arena[at : at + len(buffer)])
        buffers[-1][:] = buffer
        at += -(-len(buffer) // 4096) * 4096

    def engine(positions: int) -> TorchEngine:
        return TorchEngine("cpu", positions, threads=1, cpu_weights="stored", ranks=left.pop(0))

    async with cluster(
        "a",
        "b",
        kv_capacity=dict.fromkeys("ab", 8 * PAGE),
        speculation=3,
        manifest=model.manifest,
        buffers=buffers,
        make_engine=engine,
    ) as nodes:
        over = [submit(f"p{i}", TWO, prompt=p, max_tokens=COUNT) for i, p in enumerate(PROMPTS[:2])]
        attempts = [await nodes.submit(message) for message in over]
        for attempt, prompt in zip(attempts, PROMPTS, strict=False):
            ids = (await attempt.end()).ids
            assert ids == model.expected_tokens(list(prompt), COUNT, ids)
        alone = [submit(f"a{i}", WHOLE, prompt=p, max_tokens=COUNT) for i, p in enumerate(PROMPTS)]
        attempts = await nodes.submit_together(*alone)
        for attempt, prompt in zip(attempts, PROMPTS, strict=True):
            ids = (await attempt.end()).ids
            assert ids == model.expected_tokens(list(prompt), COUNT, ids)
        assert nodes.workers["a"].load().preemptions > 0

        last = await nodes.submit(submit("last", WHOLE, prompt=PROMPTS[0], max_tokens=COUNT))
        await last.until(lambda attempt: len(attempt.ids) >= 2)
        os.kill(both["a"].processes[0], signal.SIGKILL)
        assert (await last.end()).code == EngineFailed.code
        assert "ended with signal 9" in both["a"].broken
        assert both["b"].broken == ""
