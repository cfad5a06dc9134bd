"""Whatever is said to a node, and whatever breaks in it, ends what it concerns, not the node."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.node.core.profile import Profiler
from services.node.core.rows import Context, Draw, Row
from services.node.engine.engine import TorchEngine
from services.node.execution import activations
from services.node.execution.worker import Worker
from services.node.hosting.hosting import Hosting
from services.node.hosting.landings import Landings
from services.node.hosting.library import Library
from services.node.hosting.reports import Reports
from services.node.moving.data_plane import DataPlane
from services.node.moving.mover import Mover
from services.node.peers import Peers
from services.node.transport.wire import Kind, Purpose, encode_prefix
from shared import subjects
from shared.errors import CapacityExceeded, LambdaScaleError
from shared.ids import InstanceId, ModelName, NodeId, RequestId
from shared.messages import Message, Ok
from shared.messages.copies import DropCopy, KeepCopy
from shared.messages.instances import Stage
from shared.messages.pool import ModelAdded, ModelRemoved, NodeGone, NodeJoined, ReportStatus
from shared.messages.scaling import BlockArrived, ImportModel, PeerSuspect, ReleaseModel
from shared.messages.serving import Cancel, LogitRules, Sampling, Submit
from shared.messages.story import StoryQuery
from tests.support.malformed import ERRORS, Likely, altered, well_framed
from tests.support.raw_peer import hello, next_frame
from tests.unit.node.cluster import ALL, BLOCKS, GATEWAY, Nodes, nodes

FROM_A = dict.fromkeys(ALL, "a")
B = NodeId("b")
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """To draw every traceback with its locals would take most of the time."""
    with capture_logs():
        yield


@asynccontextmanager
async def two(tmp_path: Path, checkpoint: Path) -> AsyncIterator[Nodes]:
    """`a` serves a model, `b` is what things happen to."""
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        await up.promoted("a")
        yield up


async def serves(up: Nodes, request: str = "healthy") -> None:
    """`b` takes the model up anew, and generates what `a` does."""
    await up.release("b")
    event = f"ev-{request}"
    await up.apply("b", FROM_A, event=event)
    await up.until_arrived("b", ALL, event)
    on_a = await up.generate("a", request=f"{request}-a")
    assert await up.generate("b", request=f"{request}-b") == on_a
    assert await up.generate("a", "b", request=f"{request}-ab") == on_a


# --- what is said over the bus --------------------------------------------------------


def asked(up: Nodes) -> list[tuple[str, Message]]:
    """What `b` is asked for, as it should be."""
    info = up.info("b")
    plan = up.plan("b", FROM_A, promote=(0,))
    stages = (Stage(B, info.address, 0, BLOCKS),)
    submit = Submit(
        request=RequestId("r"),
        attempt=1,
        gateway=GATEWAY,
        model_id=plan.model_id,
        instance=InstanceId("i"),
        stages=stages,
        tokens=(5, 9, 200, 17),
        prompt_tokens=4,
        max_tokens=3,
        stop_ids=(1,),
        sampling=Sampling(temperature=0.5),
        rules=LogitRules(presence_penalty=0.5),
    )
    release = ReleaseModel(node=B, generation=info.generation, model_id=plan.model_id, keep=None)
    packed = ImportModel(path=str(up.checkpoint), name=ModelName("other"), blocks=0)
    return [
        (subjects.node_plan(B), plan),
        (subjects.node_release(B), release),
        (subjects.node_submit(B), submit),
        (subjects.node_import(B), packed),
    ]


TOLD = {
    subjects.node_cancel(B): (Cancel,),
    subjects.POOL_MODELS: (ModelAdded, ModelRemoved),
    subjects.POOL_NODES: (NodeJoined, NodeGone),
    subjects.POOL_REPORT: (ReportStatus,),
}
"""What is told it, or everybody; none answers."""


DRAWN: list[tuple[str, type[Message]]] = [
    (subjects.node_keep(B), KeepCopy),
    (subjects.node_drop(B), DropCopy),
    (subjects.node_story(B), StoryQuery),
    (subjects.node_release(B), ReleaseModel),
]
"""What it is asked for, with fields of any value."""


async def say_anything(up: Nodes, data: st.DataObject) -> None:
    subject, kind = data.draw(st.sampled_from(DRAWN))
    info, model = up.info("b"), up.record.model_id
    likely: Likely = {"node": [B], "generation": [info.generation], "model_id": [model]}
    with suppress(LambdaScaleError):
        await up.request(subject, data.draw(well_framed(kind, nan=True, **likely)), Message)
    subject, message = data.draw(st.sampled_from(asked(up)))
    if data.draw(st.booleans()):
        told = data.draw(st.sampled_from(sorted(TOLD)))
        await up.bus.publish(told, data.draw(st.one_of(*map(well_framed, TOLD[told]))))
    said = data.draw(st.just(Ok()) | altered(message))
    with suppress(LambdaScaleError):  # most are refused
        await up.request(subject, said)


@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # to start nodes anew for each smaller example takes too long
)
@given(data=st.data())
def test_nothing_that_is_said_over_the_bus_ends_a_node(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> None:
    async def live() -> None:
        async with two(tmp_path_factory.mktemp("nodes"), checkpoint) as up:
            with capture_logs() as logs:
                for _ in range(data.draw(st.integers(1, 25))):
                    await say_anything(up, data)
            untyped = [log for log in logs if log["event"] in ("server failed", "handler failed")]
            assert not untyped
            await serves(up)

    asyncio.run(live())


# --- what a stranger says on the data plane ---------------------------------------------


def killer(up: Nodes) -> bytes:
    """Rules of no tokens so far: they ended every node that this was sent to."""
    path = up.plan("b").model_id
    info = up.info("b")
    message = {
        "kind": "forward",
        "path": {
            "model_id": path,
            "stages": [Stage(NodeId("x"), "tcp://x:1", 0, 2), Stage(B, info.address, 2, BLOCKS)],
        },
        "stage": 1,
        "batch": 1,
        "rows": [Row("x#1", 7, 1, 9, (), Draw(-1, Sampling(), Context((), 1, (), LogitRules())))],
    }
    header = {"v": activations.VERSION, "message": message, "dtype": "float32", "hidden_size": 64}
    return msgspec.msgpack.encode(header)


async def test_a_message_of_a_stranger_does_not_end_a_node(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with two(tmp_path, checkpoint) as up:
        host, port = up.info("b").address.removeprefix("tcp://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(hello(Purpose.MESSAGES))
        header, payload = killer(up), bytes(4 * 64)
        writer.write(encode_prefix(Kind.MESSAGE, body=len(header), payload=len(payload)))
        writer.write(header + payload)
        await writer.drain()
        await up.until_violations("b", 1)
        await serves(up)
        writer.close()


async def test_whoever_says_that_it_is_this_node_and_hangs_up_ends_nothing(
    tmp_path: Path, checkpoint: Path
) -> None:
    """Nine such connections made every request fail."""
    async with two(tmp_path, checkpoint) as up:
        host, port = up.info("a").address.removeprefix("tcp://").split(":")
        for number in range(9):
            for says in (up.info("a").address, up.info("b").address):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(hello(Purpose.MESSAGES, number, says))
                await next_frame(reader)
                writer.close()
                await writer.wait_closed()
        await serves(up)
        assert up.suspects.messages == []


async def test_a_peer_that_dials_is_dialled_back_so_that_its_loss_is_seen(
    tmp_path: Path, checkpoint: Path
) -> None:
    """The node that is dialled makes no connections ahead of need."""
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.start("s", mesh_peers=0)
        await up.promoted("a")
        await up.apply("s", FROM_A)
        await up.until_arrived("s", ALL)
        await up.start("t", mesh_peers=0)
        await up.apply("t", dict.fromkeys(ALL, "s"))
        await up.until_arrived("t", ALL)
        await up.statuses.until(lambda: "t" in peers(up, "s"))
        data = up.services["t"]._data
        assert isinstance(data, DataPlane)
        await data._close()
        await up.suspects.until(
            lambda: any(
                isinstance(m, PeerSuspect) and (m.reporter, m.node) == ("s", "t")
                for m in up.suspects.messages
            )
        )


def peers(up: Nodes, name: str) -> set[str]:
    status = up.status(name)
    return {peer for way in (status.peers.values() if status else ()) for peer in way}


# --- what breaks in the node --------------------------------------------------------------


class Breaks:
    """A method that raises, and says when it did."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.raised = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def until_raised(self, what: str) -> None:
        try:
            await asyncio.wait_for(self.raised.wait(), WAIT_S)
        except TimeoutError:
            raise AssertionError(f"{what} was not called") from None

    def __call__(self, *_: Any, **__: Any) -> Any:
        self._loop.call_soon_threadsafe(self.raised.set)
        raise type(self.error)(*self.error.args)


class BreaksLater(Breaks):
    """The same for a coroutine."""

    async def __call__(self, *_: Any, **__: Any) -> Any:
        super().__call__()


BROKEN: tuple[tuple[type, str, type[Breaks]], ...] = (
    (Landings, "land", Breaks),
    (Landings, "_on_arrived", BreaksLater),
    (Reports, "arrived", BreaksLater),
    (Profiler, "pulled", Breaks),
    (Profiler, "sent", Breaks),
    (Profiler, "profile", Breaks),
    (Library, "file", BreaksLater),
    (Worker, "use_tokenizer", Breaks),
    (Worker, "attach", BreaksLater),
    (Worker, "open_model", BreaksLater),
    (DataPlane, "apply", BreaksLater),
    (Mover, "host", Breaks),
    (TorchEngine, "attach", Breaks),
    (TorchEngine, "open_model", Breaks),
)


@pytest.mark.parametrize("first", range(0, len(ERRORS), len(BROKEN)))
async def test_what_breaks_while_a_model_comes_does_not_end_the_node(
    first: int, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thing after the other, each with another error: to start nodes for each thing and each
    error would take an hour."""
    async with two(tmp_path, checkpoint) as up:
        for number, (owner, method, breaks) in enumerate(BROKEN, first):
            error = ERRORS[number % len(ERRORS)]
            with monkeypatch.context() as patch:
                broken = breaks(error)
                patch.setattr(owner, method, broken)
                with suppress(LambdaScaleError):
                    await up.apply("b", FROM_A, event=f"{owner.__name__}.{method}")
                await broken.until_raised(f"{owner.__name__}.{method}")
            await up.release("b")
        await serves(up)
        await up.release("b")
        await up.nothing_leaked("b")


@pytest.mark.parametrize(
    ("owner", "method", "breaks"),
    [
        (Profiler, "ran", Breaks),
        (Peers, "lost", Breaks),
        (Library, "learn", BreaksLater),
        (Hosting, "release", BreaksLater),
    ],
)
async def test_what_breaks_in_an_event_does_not_end_the_node(
    owner: type,
    method: str,
    breaks: type[Breaks],
    tmp_path: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two(tmp_path, checkpoint) as up:
        await serves(up, "before")
        with monkeypatch.context() as patch:
            broken = breaks(ZeroDivisionError("a bug"))
            patch.setattr(owner, method, broken)
            await happens(up, method)
            await broken.until_raised(method)
        await serves(up)


async def happens(up: Nodes, method: str) -> None:
    record = msgspec.structs.replace(up.record, model_id="1" * 32)
    if method == "ran":
        await up.generate("b", request="x")
    elif method == "lost":
        data = up.services["b"]._data
        assert isinstance(data, DataPlane)
        data.send("tcp://127.0.0.1:1", b"", [])
    elif method == "learn":
        await up.bus.publish(subjects.POOL_MODELS, ModelAdded(record=record))
    else:
        removed = ModelRemoved(name=record.name, model_id=record.model_id)
        await up.bus.publish(subjects.POOL_MODELS, removed)


def again(up: Nodes) -> list[BlockArrived]:
    return [arrival for arrival in up.arrived("b") if arrival.revision == 1]


@pytest.mark.parametrize("error", [MemoryError("all gone"), torch.OutOfMemoryError("CUDA's, too")])
async def test_a_block_that_the_engine_has_no_memory_for_is_told_and_can_be_asked_for_again(
    error: Exception, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(tmp_path, checkpoint) as up:
        with monkeypatch.context() as patch:
            patch.setattr(TorchEngine, "attach", Breaks(error))
            await up.apply("b", FROM_A)
            failed = await up.until_failed("b", len(ALL))
            assert {m.code for m in failed} == {CapacityExceeded.code}
        await up.apply("b", FROM_A, revision=1)
        await up.arrivals.until(lambda: {m.block for m in again(up)} == set(ALL))
        assert await up.generate("b", request="on b") == await up.generate("a", request="on a")
