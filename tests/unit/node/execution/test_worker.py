import asyncio
import threading

import msgspec
import pytest

from services.node.engine.base import Context, Engine, StagePart, Weights
from services.node.execution import worker as execution
from services.node.execution.worker import Worker
from shared.errors import (
    BadInput,
    CapacityExceeded,
    ConfigError,
    Conflict,
    NotFound,
    PeerLost,
    SourceLost,
    StaleEpoch,
)
from shared.grammar import FOLLOW_STACK
from shared.ids import GatewayId, ModelId, NodeId, RequestId
from shared.messages.instances import Stage
from shared.messages.serving import Cancel, LogitRules, Submit
from tests.support.hash_engine import VOCAB, HashEngine, continuation, hash_manifest
from tests.support.submits import BLOCKS, GATEWAY, MODEL, THREE, TWO, WHOLE, stages, submit
from tests.support.worker_cluster import Attempt, Cluster, cluster

PROMPT = (3, 1, 4, 1, 5)
OTHER = ModelId("other")
PATHS = pytest.mark.parametrize("path", [WHOLE, TWO, THREE], ids=["whole", "two", "three"])


def expected(message: Submit) -> list[int]:
    done = len(message.tokens) - message.prompt_tokens
    prompt = message.tokens[: message.prompt_tokens]
    return continuation(prompt, message.max_tokens, BLOCKS, message.sampling.seed)[done:]


@PATHS
async def test_requests_of_a_path_get_their_tokens(path: tuple[Stage, ...]) -> None:
    messages = [
        submit(f"r{i}", path, prompt=tuple(range(1, 2 + 3 * i)), max_tokens=5 + i, seed=i)
        for i in range(6)
    ]
    async with cluster("a", "b", "c") as nodes:
        attempts = [await nodes.submit(message) for message in messages]
        for message, attempt in zip(messages, attempts, strict=True):
            await attempt.end()
            assert attempt.ids == expected(message)
            assert [token.index for token in attempt.tokens] == list(range(message.max_tokens))
            assert [token.finish for token in attempt.tokens[:-1]] == [""] * len(attempt.ids[:-1])
            assert attempt.tokens[-1].finish == "length"
        await nodes.all_free()
        assert sum(w.load().violations for w in nodes.workers.values()) == 0


async def test_the_threads_have_the_stack_that_grammars_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: dict[str, int] = {}
    start = threading.Thread.start

    def watched(thread: threading.Thread) -> None:
        begun[thread.name] = size = threading.stack_size()  # which sets it to 0
        threading.stack_size(size)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", watched)
    async with cluster("a"):
        assert begun["engine-a"] == begun["grammars-a"] == FOLLOW_STACK
        assert threading.stack_size() == 0


async def test_a_node_leads_follows_and_replicates_at_once() -> None:
    back = stages(("b", 0, 3), ("a", 3, BLOCKS))
    around = stages(("c", 0, 2), ("a", 2, 4), ("b", 4, BLOCKS))
    paths = [WHOLE, TWO, THREE, back, around]
    messages = [
        submit(f"r{i}", paths[i % len(paths)], prompt=tuple(range(i, i + 9)), seed=i, max_tokens=20)
        for i in range(15)
    ]
    async with cluster("a", "b", "c") as nodes:
        attempts = [await nodes.submit(message) for message in messages]
        for message, attempt in zip(messages, attempts, strict=True):
            assert (await attempt.end()).ids == expected(message)
        await nodes.all_free()


async def test_a_stop_id_ends_a_request() -> None:
    ids = continuation(PROMPT, 8, BLOCKS)
    async with cluster("a", "b") as nodes:
        attempt = await nodes.submit(submit("r", TWO, stop_ids=(ids[3],)))
        await attempt.end()
        assert attempt.ids == ids[: ids.index(ids[3]) + 1]
        assert attempt.tokens[-1].finish == "stop"


@PATHS
async def test_a_resumed_request_goes_on_where_it_was(path: tuple[Stage, ...]) -> None:
    ids = continuation(PROMPT, 8, BLOCKS, seed=5)
    async with cluster("a", "b", "c") as nodes:
        resumed = submit("r", path, so_far=tuple(ids[:3]), attempt=4, seed=5)
        attempt = await nodes.submit(resumed)
        await attempt.end()
        assert attempt.ids == ids[3:]
        assert [token.index for token in attempt.tokens] == [3, 4, 5, 6, 7]


@PATHS
async def test_a_cancelled_request_is_freed_everywhere(path: tuple[Stage, ...]) -> None:
    async with cluster("a", "b", "c") as nodes:
        gate = nodes.gate("a", "long", 3)
        long = await nodes.submit(submit("long", path, max_tokens=100))
        await gate.wait()
        nodes.workers["a"].cancel(Cancel(request=RequestId("long"), attempt=1))
        gate.open()
        await nodes.all_free()
        other = await nodes.submit(submit("other", path))
        assert (await other.end()).ids == continuation(PROMPT, 8, BLOCKS)
        assert len(long.ids) == 3
        assert long.failed is None


async def not_answered(nodes: Cluster, message: Submit) -> "asyncio.Task[Attempt]":
    """Submits the attempt to node a. Returns once it has come there, and waits."""
    taken = asyncio.create_task(nodes.submit(message))
    await asyncio.sleep(0)
    assert await nodes.workers["a"].story("r")  # asked after the attempt has come
    assert not taken.done()
    return taken


async def test_a_suspect_is_taken_on_a_path_only_when_every_stage_has_room() -> None:
    """A node that was dead before, it cannot have killed."""
    ids = continuation(PROMPT, 8, BLOCKS)
    async with cluster("a", "b", "c") as nodes:
        nodes.cut.add("c")
        suspect = msgspec.structs.replace(submit("r", THREE), alone_until=len(PROMPT) + 2)
        taken = await not_answered(nodes, suspect)
        nodes.workers["a"].on_peer_lost("mem://c", PeerLost("connection reset"))
        with pytest.raises(CapacityExceeded, match="before all nodes of its path"):
            await taken
        nodes.cut.clear()
        again = await nodes.submit(msgspec.structs.replace(suspect, attempt=2))
        assert (await again.end()).ids == ids


async def test_an_attempt_is_not_taken_if_what_it_takes_over_is_lost() -> None:
    """The other node may have died of the request."""
    async with cluster("a", "b") as nodes:
        nodes.cut.add("b")
        source = stages(("b", 0, BLOCKS))
        moves = msgspec.structs.replace(submit("r", WHOLE, attempt=2), takes_over=1, kv_from=source)
        taken = await not_answered(nodes, moves)
        nodes.workers["a"].on_peer_lost("mem://b", PeerLost("connection reset"))
        with pytest.raises(SourceLost, match="before it had the KV of attempt 1"):
            await taken


async def test_a_lost_peer_fails_its_attempts_and_no_others() -> None:
    async with cluster("a", "b", "c") as nodes:
        gate = nodes.gate("a", "through", 2)
        # Together: an engine that waits at the gate takes in no submit.
        through, beside = await asyncio.gather(
            nodes.submit(submit("through", THREE, max_tokens=100)),
            nodes.submit(submit("beside", WHOLE, max_tokens=100)),
        )
        await gate.wait()
        nodes.cut.add("b")
        nodes.workers["a"].on_peer_lost("mem://b", PeerLost("connection reset"))
        gate.open()
        assert (await through.end()).code == "peer_lost"
        assert len(through.ids) == 2
        await nodes.all_free("c")
        nodes.workers["b"].on_peer_lost("mem://a", PeerLost("connection reset"))
        await nodes.all_free("b")
        assert (await beside.end()).ids == continuation(PROMPT, 100, BLOCKS)


async def test_a_break_between_two_later_stages_reaches_the_leader() -> None:
    async with cluster("a", "b", "c") as nodes:
        gate = nodes.gate("a", "r", 2)
        attempt = await nodes.submit(submit("r", THREE, max_tokens=100))
        await gate.wait()
        nodes.workers["b"].on_peer_lost("mem://c", PeerLost("connection reset"))
        gate.open()
        assert (await attempt.end()).code == "peer_lost"
        await nodes.all_free()


async def test_a_stage_without_room_fails_only_what_does_not_fit() -> None:
    async with cluster("a", "b", kv_capacity={"b": 100}) as nodes:
        big = await nodes.submit(submit("big", TWO, max_tokens=200))
        small = await nodes.submit(submit("small", TWO))
        assert (await big.end()).code == "capacity"
        assert (await small.end()).ids == continuation(PROMPT, 8, BLOCKS)
        await nodes.all_free()


async def test_waits_for_kv_at_the_leader() -> None:
    async with cluster("a", kv_capacity={"a": 30}) as nodes:
        messages = [submit(f"r{i}", WHOLE, max_tokens=20) for i in range(2)]
        attempts = [await nodes.submit(message) for message in messages]
        for attempt in attempts:
            assert (await attempt.end()).ids == continuation(PROMPT, 20, BLOCKS)


@pytest.mark.parametrize("closing", ["a", "b"])
async def test_giving_a_model_up_fails_its_attempts(closing: str) -> None:
    async with cluster("a", "b") as nodes:
        gate = nodes.gate("a", "r", 2)
        attempt = await nodes.submit(submit("r", TWO, max_tokens=100))
        await gate.wait()
        closed = asyncio.create_task(nodes.workers[closing].close_model(MODEL))
        await asyncio.sleep(0)
        gate.open()
        await closed
        assert (await attempt.end()).code == "not_found"
        await nodes.all_free()


async def test_a_stage_without_the_model_fails_attempts() -> None:
    async with cluster("a", "b") as nodes:
        await nodes.workers["b"].close_model(MODEL)
        attempt = await nodes.submit(submit("r", TWO))
        assert (await attempt.end()).code == "not_found"
        await nodes.all_free()


@pytest.mark.parametrize("broken", ["a", "b"])
async def test_an_engine_that_breaks_fails_the_batch_and_goes_on(broken: str) -> None:
    def explode(block: int, part: StagePart) -> None:
        raise RuntimeError("device side assert")

    async with cluster("a", "b") as nodes:
        nodes.engines[broken].before_run = explode
        attempt = await nodes.submit(submit("r", TWO))
        assert (await attempt.end()).code == "engine_failed"
        assert attempt.failed is not None
        assert "device side assert" in attempt.failed.message
        nodes.engines[broken].before_run = lambda block, part: None
        again = await nodes.submit(submit("r", TWO, attempt=2))
        assert (await again.end()).ids == continuation(PROMPT, 8, BLOCKS)
        await nodes.all_free()


async def test_malformed_messages_are_counted_and_harmless() -> None:
    async with cluster("a", "b") as nodes:
        running = await nodes.submit(submit("r", TWO, max_tokens=300))
        for header in (b"", b"\xc1", b"\x80", b"junk" * 50):
            nodes.workers["b"].on_message("mem://x", memoryview(header), memoryview(b"body"))
        assert (await running.end()).ids == continuation(PROMPT, 300, BLOCKS)
        assert nodes.workers["b"].load().violations == 4


async def test_refuses_what_it_cannot_serve() -> None:
    async with cluster("a", slots=1) as nodes:
        worker = nodes.workers["a"]
        ids = tuple(continuation(PROMPT, 8, BLOCKS))
        for wrong in (
            submit("r", stages(("b", 0, BLOCKS))),
            submit("r", stages(("a", 0, 3))),
            submit("r", stages(("a", 0, 3), ("b", 4, BLOCKS))),
            submit("r", stages(("a", 0, 3), ("a", 3, BLOCKS))),
            submit("r", ()),
            submit("r", WHOLE, prompt=()),
            submit("r", WHOLE, prompt=(3, VOCAB)),
            submit("r", WHOLE, prompt=(3, -1)),
            submit("r", WHOLE, so_far=ids),
            submit("r", WHOLE, image=b"pixels"),
        ):
            with pytest.raises(BadInput):
                await worker.submit(wrong)
        with pytest.raises(CapacityExceeded, match=r"node\.kv_bytes"):
            await worker.submit(submit("r", WHOLE, max_tokens=20_000))


@pytest.mark.parametrize(("at_once_s", "a_turn"), [(0.0, 1), (100.0, BLOCKS)])
async def test_what_runs_has_its_steps_between_blocks_that_are_attached_together(
    monkeypatch: pytest.MonkeyPatch, at_once_s: float, a_turn: int
) -> None:
    """If they are attached fast, some are in one turn."""
    monkeypatch.setattr(execution, "AT_ONCE_S", at_once_s)
    async with cluster("a") as nodes:
        worker, engine = nodes.workers["a"], nodes.engines["a"]
        attach, ran = engine.attach, list[int]()
        """How many blocks had been run before each block was attached."""

        def noting(model: ModelId, block: int, weights: Weights) -> None:
            ran.append(sum(len(sweep.ran) for sweep in engine.sweeps))
            attach(model, block, weights)

        engine.attach = noting  # type: ignore[method-assign, assignment]
        await worker.open_model(OTHER, hash_manifest(BLOCKS))
        gate = nodes.gate("a", "r", 0)
        attempt = await nodes.submit(submit("r", WHOLE))
        await gate.wait()
        asked = worker.attach(OTHER, dict.fromkeys(range(BLOCKS), memoryview(b"")))
        attaching = asyncio.create_task(asked)
        await asyncio.sleep(0)
        gate.open()
        assert await attaching == {}
        assert ran == [ran[0] + n // a_turn for n in range(BLOCKS)]
        await attempt.end()


async def test_a_block_that_cannot_be_attached_leaves_the_others() -> None:
    async with cluster("a") as nodes:
        worker, engine = nodes.workers["a"], nodes.engines["a"]
        attach, error = engine.attach, CapacityExceeded("no memory")

        def refusing(model: ModelId, block: int, weights: Weights) -> None:
            if block == 1:
                raise error
            attach(model, block, weights)

        engine.attach = refusing  # type: ignore[method-assign, assignment]
        await worker.open_model(OTHER, hash_manifest(BLOCKS))
        assert await worker.attach(OTHER, dict.fromkeys(range(4), memoryview(b""))) == {1: error}
        assert engine.held(OTHER) == {0, 2, 3}


async def test_refuses_blocks_it_does_not_hold() -> None:
    async with cluster("a") as nodes:
        worker = nodes.workers["a"]
        await worker.close_model(MODEL)
        with pytest.raises(NotFound, match="does not have model"):
            await worker.submit(submit("r", WHOLE))
        await worker.open_model(MODEL, hash_manifest(BLOCKS))
        await worker.attach(MODEL, {0: memoryview(b"")})
        with pytest.raises(NotFound, match=r"\[1, 2, 3, 4, 5\]"):
            await worker.submit(submit("r", WHOLE))
        await worker.submit(submit("r", stages(("a", 0, 1), ("b", 1, BLOCKS))))


async def test_what_a_node_has_no_slots_for_is_refused() -> None:
    async with cluster("a", slots=2) as nodes:
        gate = nodes.gate("a", "r0", 0)
        await nodes.submit(submit("r0", WHOLE))
        await gate.wait()
        more = [submit(f"r{i}", WHOLE) for i in range(1, 3)]
        answers = [asyncio.create_task(nodes.submit(message)) for message in more]
        await asyncio.sleep(0)
        gate.open()
        results = await asyncio.gather(*answers, return_exceptions=True)
        assert [type(result) for result in results] == [Attempt, CapacityExceeded]


async def test_only_the_newest_attempt_of_a_request_runs() -> None:
    async with cluster("a", "b") as nodes:
        gate = nodes.gate("b", "r", 1)
        old = await nodes.submit(submit("r", TWO, attempt=2))
        await gate.wait()
        for attempt in (1, 2):
            with pytest.raises(StaleEpoch):
                await nodes.submit(submit("r", WHOLE, attempt=attempt))
        new = await nodes.submit(submit("r", WHOLE, attempt=3))
        gate.open()
        assert (await new.end()).ids == continuation(PROMPT, 8, BLOCKS)
        assert not old.over
        await nodes.all_free()


async def test_a_cancel_that_overtakes_its_submit_counts() -> None:
    async with cluster("a") as nodes:
        nodes.workers["a"].cancel(Cancel(request=RequestId("r"), attempt=1))
        with pytest.raises(StaleEpoch):
            await nodes.submit(submit("r", WHOLE))


async def test_a_step_is_one_message_a_gateway() -> None:
    other = GatewayId("h")
    async with cluster("a", step_tokens=100) as nodes:
        gate = nodes.gate("a", "first", 0)
        first = await nodes.submit(submit("first", WHOLE, max_tokens=2))
        await gate.wait()
        later = [
            asyncio.create_task(nodes.submit(submit(name, WHOLE, gateway=gateway, max_tokens=1)))
            for name, gateway in (("x", GATEWAY), ("y", GATEWAY), ("z", other))
        ]
        await asyncio.sleep(0)
        gate.open()
        await first.end()
        for task in later:
            await (await task).end()
        seen = [(g, [t.request for t in m.tokens]) for g, m in nodes.messages]
        assert seen == [(GATEWAY, ["first"]), (GATEWAY, ["first", "x", "y"]), (other, ["z"])]


async def test_a_step_floor_takes_calls_in_and_does_not_delay_the_stop() -> None:
    ran = threading.Event()
    async with cluster("a", make_engine=lambda kv: HashEngine(kv, floor_s=3600)) as nodes:
        nodes.engines["a"].before_run = lambda block, part: ran.set()
        held = await nodes.submit(submit("held", WHOLE))
        assert await asyncio.to_thread(ran.wait, 10)
        late = await asyncio.wait_for(nodes.submit(submit("late", WHOLE)), 10)
        assert nodes.workers["a"].load().waiting == 1
        await asyncio.wait_for(nodes.workers["a"].stop(), 10)
        for attempt in (held, late):
            assert (await attempt.end()).code == "not_found"
            assert not attempt.tokens


async def test_after_the_stop_calls_are_refused() -> None:
    async with cluster("a") as nodes:
        worker = nodes.workers["a"]
        await worker.stop()
        await worker.wait()
        with pytest.raises(Conflict):
            await worker.submit(submit("r", WHOLE))
        worker.on_message("mem://x", memoryview(b""), memoryview(b""))
        await worker.stop()


async def test_a_submit_behind_the_stop_is_refused_not_lost() -> None:
    async with cluster("a") as nodes:
        gate = nodes.gate("a", "r", 0)
        await nodes.submit(submit("r", WHOLE))
        await gate.wait()
        stopped = asyncio.create_task(nodes.workers["a"].stop())
        await asyncio.sleep(0)
        late = asyncio.create_task(nodes.submit(submit("late", WHOLE)))
        await asyncio.sleep(0)
        gate.open()
        with pytest.raises(Conflict):
            await late
        await stopped


async def test_a_thread_that_cannot_start_says_why() -> None:
    def no_engine() -> Engine:
        raise ConfigError("device cuda:9 does not exist")

    worker = Worker(
        node=NodeId("a"),
        make_engine=no_engine,
        slots=1,
        step_tokens=1,
        send=lambda *_: None,
        emit=lambda *_: None,
        ran=lambda *_: None,
    )
    worker.start()
    with pytest.raises(Conflict, match="cuda:9"):
        await worker.open_model(MODEL, hash_manifest(1))
    with pytest.raises(ConfigError, match="cuda:9"):
        await worker.wait()
    await worker.stop()


RULES = LogitRules(grammar="g")


class Making:
    """Holds grammars before they are made."""

    def __init__(self, engine: HashEngine) -> None:
        self.begun = asyncio.Event()
        self.contexts: list[Context] = []
        self.error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._go_on = threading.Event()
        engine.making = self._wait

    def _wait(self, context: Context) -> None:
        self.contexts.append(context)
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self._go_on.wait(20)
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        self._go_on.set()


@PATHS
async def test_others_get_their_tokens_while_a_grammar_is_made(path: tuple[Stage, ...]) -> None:
    last = path[-1].node
    async with cluster("a", "b", "c") as nodes:
        making = Making(nodes.engines[last])
        gate = nodes.gate("a", "before", 3)
        before = await nodes.submit(submit("before", path, max_tokens=20))
        await gate.wait()
        said = tuple(continuation(PROMPT, 2, BLOCKS))
        message = submit("held", path, rules=RULES, so_far=said)
        answer = asyncio.create_task(nodes.submit(message))
        await asyncio.sleep(0)
        gate.open()
        held = await answer
        await making.begun.wait()
        after = await nodes.submit(submit("after", path, max_tokens=20))
        for attempt in (before, after):
            assert (await attempt.end()).ids == continuation(PROMPT, 20, BLOCKS)
        assert not held.over
        assert not held.tokens
        making.end()
        assert (await held.end()).ids == expected(message)
        (context,) = making.contexts
        assert context == Context((*PROMPT, *said), len(PROMPT), (), RULES)
        await nodes.all_free()


class Panic(BaseException):
    """What becomes of one in Rust."""


@PATHS
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInput("no such rule"), "bad_input"),
        (KeyError("odd"), "error"),
        (Panic("unreachable code"), "error"),
    ],
)
async def test_a_grammar_that_cannot_be_made_fails_its_own_request(
    path: tuple[Stage, ...], error: BaseException, code: str
) -> None:
    async with cluster("a", "b", "c") as nodes:
        making = Making(nodes.engines[path[-1].node])
        making.error = error
        held = await nodes.submit(submit("held", path, rules=RULES))
        other = await nodes.submit(submit("other", path))
        await making.begun.wait()
        making.end()
        assert (await held.end()).code == code
        assert held.failed is not None
        assert str(error) in held.failed.message
        assert (await other.end()).ids == continuation(PROMPT, 8, BLOCKS)
        await nodes.all_free()


async def test_a_grammar_of_a_cancelled_request_is_not_made() -> None:
    async with cluster("a") as nodes:
        making = Making(nodes.engines["a"])
        first = await nodes.submit(submit("first", WHOLE, rules=RULES))
        await making.begun.wait()
        second = submit("second", WHOLE, rules=RULES)
        await nodes.submit(second)
        third = await nodes.submit(submit("third", WHOLE, rules=RULES))
        nodes.workers["a"].cancel(Cancel(request=second.request, attempt=1))
        await nodes.workers["a"].ready()
        making.end()
        for attempt in (first, third):
            assert (await attempt.end()).ids == continuation(PROMPT, 8, BLOCKS)
        assert len(making.contexts) == 2
        assert nodes.engines["a"].ruled == {"first#1", "third#1"}
        await nodes.all_free()


async def test_a_worker_stops_while_a_grammar_is_made() -> None:
    async with cluster("a") as nodes:
        making = Making(nodes.engines["a"])
        held = await nodes.submit(submit("held", WHOLE, rules=RULES))
        await making.begun.wait()
        stopped = asyncio.create_task(nodes.workers["a"].stop())
        assert (await held.end()).code == "not_found"
        making.end()
        await stopped
