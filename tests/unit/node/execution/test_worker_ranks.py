"""The engine's thread over ranks that are killed."""

import os
import re
import shutil
import signal

import pytest

from services.node.engine.engine import TorchEngine
from services.node.engine.ranks import Ranks
from services.node.memory.arena import Arena
from shared.errors import CapacityExceeded, EngineFailed
from shared.step_costs import StepCosts
from tests.support.submits import WHOLE, submit
from tests.support.worker_cluster import cluster
from tests.unit.node.engine.models import make_model

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")

COUNT = 200
PROMPT = tuple(range(20))


async def test_requests_go_on_when_a_rank_is_killed() -> None:
    """Those in the step that it was in may fail: gateways resume them. Those that have their next
    step before the process that is left has all blocks wait for these."""
    model, arena = make_model(), Arena(8 << 20)
    buffers = [arena.allocate(len(buffer)).memory for buffer in model.buffers]
    for memory, buffer in zip(buffers, model.buffers, strict=True):
        memory[:] = buffer
    ranks = Ranks((2,), arena.memory)

    def engine(positions: int) -> TorchEngine:
        measured = StepCosts(1, 1e9, 0.0, 0.0), StepCosts(2, 2e9, 0.0, 0.0)
        return TorchEngine("cpu", positions, threads=2, ranks=ranks, measure=lambda *_: measured)

    async with cluster(
        "a", slots=2, manifest=model.manifest, buffers=buffers, make_engine=engine
    ) as nodes:
        ranks.on_loss = nodes.workers["a"].regroup
        messages = [
            submit(name, WHOLE, prompt=PROMPT, max_tokens=COUNT) for name in ("runs", "waits")
        ]
        attempts = [await nodes.submit(message) for message in messages]
        await attempts[0].until(lambda attempt: len(attempt.ids) >= 3)
        os.kill(ranks.processes[0], signal.SIGKILL)
        wanted = model.expected_tokens(list(PROMPT), COUNT)
        for message, attempt in zip(messages, attempts, strict=True):
            await attempt.end()
            assert attempt.ids == wanted[: len(attempt.ids)]
            if attempt.failed is not None:
                assert attempt.failed.code == EngineFailed.code
                rest = submit(
                    message.request,
                    WHOLE,
                    prompt=PROMPT,
                    so_far=tuple(attempt.ids),
                    attempt=2,
                    max_tokens=COUNT,
                )
                again = await nodes.submit(rest)
                await again.end()
                assert attempt.ids + again.ids == wanted
            else:
                assert attempt.ids == wanted
        assert ranks.processes == ()
        assert nodes.workers["a"].pulse().broken == ""


async def test_a_node_that_is_about_to_end_takes_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It failed those that it had. One of them may be tried elsewhere, alone: here it would fail
    once more, and be refused as if it had broken two nodes."""
    async with cluster("a", slots=2) as nodes:
        first = await nodes.submit(submit("first", WHOLE, max_tokens=2))
        await first.end()
        ended = "its rank 1 (process 7) ended with signal 9"
        monkeypatch.setattr(nodes.workers["a"], "_broken", lambda: ended)
        with pytest.raises(CapacityExceeded, match=f"ends, since {re.escape(ended)}: submit else"):
            await nodes.submit(submit("second", WHOLE, max_tokens=2))
