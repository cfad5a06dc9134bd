"""Modelled workers on a virtual loop, wired back to back: the node's own scheduler and steps."""

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec
import pytest

from services.node.execution.steps import Steps
from services.node.transport.base import Buffer
from shared.clock import now
from shared.errors import BadInput, CapacityExceeded, Conflict, NotFound, PeerLost
from shared.ids import GatewayId, NodeId, RequestId
from shared.messages.instances import Stage
from shared.messages.serving import Cancel, Submit, Tokens
from simulation.engine import ModelledEngine, token_of
from simulation.hardware import Channel, Hardware
from simulation.loop import run
from simulation.store import HostCache
from simulation.worker import ModelledWorker
from tests.support import submits
from tests.support.submits import WHOLE, stages
from tests.unit.simulation.models import (
    BLOCKS,
    HARDWARE,
    ID,
    MANIFEST,
    MODEL,
    buffer,
    engine,
    part,
    row,
)
from tests.unit.simulation.models import run as run_sweep

DELAY_S = 0.004
TWO = stages(("a", 0, 2), ("b", 2, BLOCKS))
BACK = stages(("b", 0, 3), ("a", 3, BLOCKS))
THREE = stages(("c", 0, 1), ("b", 1, 4), ("a", 4, BLOCKS))
PROMPT = 5


def submit(name: str, path: tuple[Stage, ...] = WHOLE, *, max_tokens: int = 8) -> Submit:
    return msgspec.structs.replace(submits.submit(name, path, max_tokens=max_tokens), model_id=ID)


class Net:
    """Workers that hold the whole model, unless it is said how many blocks from the first one on;
    messages take DELAY_S."""

    def __init__(self, host: HostCache | None = None) -> None:
        self.host = host or HostCache(0.0, 0.0)
        self.workers: dict[str, ModelledWorker] = {}
        self.engines: dict[str, ModelledEngine] = {}
        self.pcie = Channel(HARDWARE.pcie_bytes_per_s)
        self.tokens: dict[str, list[int]] = {}
        self.times: dict[str, list[float]] = {}
        self.failed: dict[str, str] = {}
        self.changed = asyncio.Event()
        self.buffers = [buffer(block) for block in range(BLOCKS)]

    async def add(
        self,
        *names: str,
        kv_tokens: int = 1000,
        slots: int = 8,
        hardware: Hardware = HARDWARE,
        holds: int = BLOCKS,
    ) -> "Net":
        for name in names:
            self.engines[name] = ModelledEngine(hardware, kv_tokens)
            worker = self.workers[name] = ModelledWorker(
                node=NodeId(name),
                engine=self.engines[name],
                pcie=self.pcie,
                host=self.host,
                slots=slots,
                step_tokens=64,
                send=partial(self.send, name),
                emit=self.emit,
                ran=lambda *_: None,
            )
            worker.start()
            await worker.ready()
            await self.open(worker, self.buffers[:holds])
        return self

    async def open(self, worker: ModelledWorker, buffers: Sequence[memoryview]) -> None:
        await worker.open_model(ID, MANIFEST)
        for block, memory in enumerate(buffers):
            await worker.attach(ID, {block: memory})

    def send(self, sender: str, to: str, header: bytes, payload: Sequence[Buffer]) -> None:
        body = memoryview(payload[0]) if payload else memoryview(b"")
        asyncio.get_running_loop().call_later(
            DELAY_S,
            self.workers[to.removeprefix("mem://")].on_message,
            f"mem://{sender}",
            memoryview(header),
            body,
        )

    def emit(self, gateway: GatewayId, message: Tokens) -> None:
        for token in message.tokens:
            tokens = self.tokens.setdefault(token.request, [])
            assert token.index == len(tokens)
            tokens.append(token.token)
            times = self.times.setdefault(token.request, [])
            times.append(asyncio.get_running_loop().time())
        for failed in message.failed:
            self.failed[failed.request] = failed.code
        self.changed.set()

    async def until(self, *requests: Submit) -> None:
        """All their tokens are there, and right."""
        while any(len(self.tokens.get(r.request, ())) < r.max_tokens for r in requests):
            self.changed.clear()
            await self.changed.wait()
        for request in requests:
            assert self.tokens[request.request] == [
                token_of(request.request, index, MODEL.vocab) for index in range(request.max_tokens)
            ]

    async def go(self, *requests: Submit) -> None:
        for request in requests:
            await self.workers[request.stages[0].node].submit(request)


def test_requests_of_all_paths_get_their_tokens() -> None:
    async def main() -> None:
        net = await Net().add("a", "b", "c", slots=16)
        requests = [
            submit(f"r{i}", path, max_tokens=4 + i % 7)
            for i, path in enumerate((WHOLE, TWO, BACK, THREE) * 6)
        ]
        await net.go(*requests)
        await net.until(*requests)
        await asyncio.sleep(1)
        for worker in net.workers.values():
            load = worker.load()
            assert (load.running, load.waiting, load.kv_used, load.violations) == (0, 0, 0, 0)
        assert sum(worker.load().tokens_out for worker in net.workers.values()) == sum(
            request.max_tokens for request in requests
        )

    run(main())


def test_steps_take_the_engines_time() -> None:
    async def main() -> None:
        net = await Net().add("a")
        request = submit("r", max_tokens=3)
        await net.go(request)
        await net.until(request)
        on = engine()
        expected: list[float] = []
        for index, count in enumerate((PROMPT, 1, 1)):
            position = 0 if index == 0 else PROMPT + index - 1
            _, due = run_sweep(on, part([row("r#1", position, count, draw=index)]))
            expected.append(due + (expected[-1] if expected else 0))
        assert net.times["r"] == pytest.approx(expected)

    run(main())


def test_what_comes_during_a_sweep_joins_it_at_a_block_ahead() -> None:
    """Node b has run its blocks before a's sweep comes to block 3: every sweep of a serves both."""

    async def main() -> None:
        net = await Net().add("a")
        slower = msgspec.structs.replace(HARDWARE, sweep_overhead_s=0.1)
        await net.add("b", hardware=slower, holds=3)  # with all blocks it would go on alone
        led, through = submit("led", max_tokens=12), submit("through", BACK, max_tokens=10)
        await net.go(led, through)
        await net.until(led, through)
        ends = [at + DELAY_S for at in net.times["led"]]
        # a takes b's prompt once its own has run.
        assert net.times["through"][2:] == pytest.approx(ends[4:12])

    run(main())


def test_a_call_is_taken_in_while_a_step_runs() -> None:
    async def main() -> None:
        net = await Net().add("a")
        first, second = submit("first", max_tokens=2), submit("second", max_tokens=2)
        await net.go(first)
        await asyncio.sleep(HARDWARE.sweep_overhead_s / 2)
        await net.go(second)
        assert net.workers["a"].load().waiting == 1
        await net.until(first, second)
        assert net.times["second"][0] == net.times["first"][1]

    run(main())


def test_the_refusals_are_the_schedulers() -> None:
    async def main() -> None:
        net = await Net().add("a", kv_tokens=30)
        with pytest.raises(CapacityExceeded):
            await net.go(submit("long", max_tokens=100))
        with pytest.raises(BadInput):
            await net.workers["a"].submit(submit("elsewhere", BACK))
        net.workers["a"].on_message("mem://x", memoryview(b"?"), memoryview(b""))
        assert net.workers["a"].load().violations == 1
        await net.workers["a"].close_model(ID)
        with pytest.raises(NotFound):
            await net.go(submit("late"))

    run(main())


def test_a_cancelled_or_lost_attempt_is_over() -> None:
    async def main() -> None:
        net = await Net().add("a", "b")
        await net.go(submit("gone", max_tokens=100), submit("cut", TWO, max_tokens=100))
        await asyncio.sleep(2)
        net.workers["a"].cancel(Cancel(request=RequestId("gone"), attempt=1))
        net.workers["a"].on_peer_lost("mem://b", PeerLost("broken"))
        await asyncio.sleep(10)
        assert net.failed == {"cut": "peer_lost"}
        assert len(net.tokens["gone"]) < 10
        assert [worker.load().running for worker in net.workers.values()] == [0, 0]

    run(main())


def test_with_nothing_to_run_nothing_wakes() -> None:
    async def main() -> None:
        net = await Net().add("a", "b")
        request = submit("r", TWO)
        await net.go(request)
        await net.until(request)
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="for ever"):
        run(main())


def test_only_a_block_that_slept_in_host_memory_comes_over_pcie() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        net = await Net().add("a")
        worker = net.workers["a"]
        assert loop.time() == 0
        for round_ in (1, 2):
            await worker.close_model(ID)
            await net.open(worker, net.buffers)
            copy_s = MODEL.nbytes / HARDWARE.pcie_bytes_per_s
            assert loop.time() == pytest.approx(round_ * copy_s)
        at = loop.time()
        await worker.attach(ID, {0: net.buffers[0]})
        await worker.close_model(ID)
        net.buffers = [buffer(block) for block in range(BLOCKS)]
        await net.open(worker, net.buffers)
        assert loop.time() == at
        request = submit("r")
        await net.go(request)
        await net.until(request)

    run(main())


def test_the_host_cache_is_told_what_is_in_use() -> None:
    async def main() -> None:
        host = HostCache(1e6, 5.0)
        net = await Net(host).add("a")
        host.put(ID, 0, 10, 0.0)
        await asyncio.sleep(100)
        assert host.nbytes(now()) == 10
        await net.workers["a"].close_model(ID)
        await net.workers["a"].close_model(ID)
        await asyncio.sleep(4)
        assert host.nbytes(now()) == 10
        await net.open(net.workers["a"], net.buffers)
        await net.workers["a"].stop()
        await asyncio.sleep(5)
        assert host.nbytes(now()) == 0

    run(main())


def test_stopping_fails_what_runs() -> None:
    async def main() -> None:
        net = await Net().add("a")
        worker = net.workers["a"]
        await net.go(submit("r", max_tokens=100), submit("s", max_tokens=100))
        await asyncio.sleep(3)
        waiter = asyncio.create_task(worker.wait())
        await worker.stop()
        await worker.stop()
        await waiter
        assert net.failed == {"r": "not_found", "s": "not_found"}
        said = len(net.tokens["r"])
        with pytest.raises(Conflict):
            await net.go(submit("late"))
        worker.on_message("mem://x", memoryview(b"?"), memoryview(b""))
        await asyncio.sleep(10)
        assert len(net.tokens["r"]) == said

    run(main())


def test_an_engine_that_fails_ends_what_it_was_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        net = await Net().add("a")

        def fail(model_id: object) -> None:
            raise ZeroDivisionError("the model is wrong")

        with monkeypatch.context() as patch:
            patch.setattr(net.engines["a"], "begin", fail)
            await net.workers["a"].submit(submit("r"))
            while not net.failed:
                net.changed.clear()
                await net.changed.wait()
        assert net.failed == {"r": "engine_failed"}
        assert net.workers["a"].load().faults == 1
        await net.go(submit("s"))

    run(main())


def test_a_bug_of_its_own_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        net = await Net().add("a")

        def fail(model_id: object) -> None:
            raise ZeroDivisionError("the model is wrong")

        monkeypatch.setattr(Steps, "flush", fail)
        with pytest.raises(ZeroDivisionError):
            await net.go(submit("r"))
        net.workers["a"].cancel(Cancel(request=RequestId("r"), attempt=1))
        with pytest.raises(ZeroDivisionError):
            await net.workers["a"].wait()
        with pytest.raises(Conflict, match="the model is wrong"):
            await net.go(submit("s"))

    run(main())
