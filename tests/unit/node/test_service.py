"""A node on the bus: its name and generations, imports, peers, its end, and a bus that fails."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from structlog.testing import capture_logs

from services.node.checkpoints.packing import chunk_bytes
from services.node.execution.steps import Steps
from services.node.execution.worker import Worker
from services.node.moving.data_plane import DataPlane
from services.node.real_parts import RealParts
from services.node.service import NodeService
from shared import clock, subjects
from shared.bus.base import On
from shared.bus.memory import MemoryBroker, MemoryBus, MemoryObjectStore
from shared.clock import wall_ns
from shared.errors import (
    BadInput,
    BadMessage,
    BusError,
    BusTimeout,
    CapacityExceeded,
    ConfigError,
    Conflict,
    CorruptCheckpoint,
    LambdaScaleError,
    ModelError,
    StaleEpoch,
    UnsupportedModel,
)
from shared.ids import Generation, ModelName, NodeId
from shared.messages import Message, Ok, Ping
from shared.messages.pool import (
    ModelAdded,
    Models,
    ModelsQuery,
    NodeGone,
    NodeJoined,
    ReportStatus,
    Tier,
)
from shared.messages.scaling import ImportModel, ModelImported, PeerSuspect, ReleaseModel
from shared.messages.story import StoryQuery, Told
from tests.unit.node.cluster import ALL, Heard, Nodes, nodes

FROM_A = dict.fromkeys(ALL, "a")
WAIT_S = 100.0
SLOW: dict[str, Any] = {"step_floor_s": 0.02}


class Trouble(MemoryBus):
    """A bus that does not take what is published on some subjects, or asset uploads."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        super().__init__(broker, name)
        self.refused: set[str] = set()
        self._lost: list[str] = []
        self._changed = asyncio.Event()

    async def until_lost(self, subject: str, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self._lost.count(subject) < count:
                self._changed.clear()
                await self._changed.wait()

    async def publish(self, subject: str, message: Message) -> None:
        if subject in self.refused:
            self._lost.append(subject)
            self._changed.set()
            raise BusError(f"{subject}: the buffer is full")
        await super().publish(subject, message)

    async def objects(self) -> MemoryObjectStore:
        if subjects.OBJECTS in self.refused:
            raise BusTimeout("no answer from the asset store")
        return await super().objects()


def die(_: Steps) -> None:
    raise ZeroDivisionError("a bug in the engine thread")


# --- life -----------------------------------------------------------------------


def open_files() -> dict[str, str]:
    """What each descriptor of this process is, but for arenas' mappings: those go with the last
    view of them, which a traceback may hold."""
    found: dict[str, str] = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return {number: name for number, name in found.items() if "memfd:lambdascale" not in name}


@contextmanager
def nothing_left() -> Iterator[None]:
    """No thread, socket or other file more than before."""
    uvloop.new_event_loop().close()  # libuv keeps a pipe from its first loop on
    threads, files = set(threading.enumerate()), open_files()
    yield
    left = {thread.name for thread in set(threading.enumerate()) - threads}
    assert {name for name in left if not name.startswith("asyncio_")} == set()
    assert set(open_files().items()) - set(files.items()) == set()


async def test_closing_in_the_midst_of_everything_leaves_nothing(
    tmp_path: Path, checkpoint: Path
) -> None:
    tasks = asyncio.all_tasks()
    with nothing_left():
        async with nodes(tmp_path, checkpoint, "a", settings=SLOW) as up:
            await up.promoted("a")
            await up.start("b", link_bytes_per_s=200_000)
            await up.apply("b", FROM_A)
            await up.until_arrived("b", (0,))
            await up.submit("a", max_tokens=100)
    assert asyncio.all_tasks() == tasks


async def test_a_name_in_use_is_a_conflict_and_the_first_node_keeps_it(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a", settings={"lease_s": 1}) as up:
        with nothing_left():
            other = Nodes(tmp_path / "other", checkpoint, up._stack)
            other.broker = up.broker
            with pytest.raises(Conflict, match="node id 'a' is in use by a running node"):
                await other.start("a", lease_s=1)
        assert [view.info for view in (await up.pool()).nodes] == [up.info("a")]
        await up.promoted("a")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"device": "tpu"}, ConfigError),
        ({"arena_bytes": 1 << 62}, CapacityExceeded),
        ({"tls_certificate": "node.pem"}, ConfigError),
        ({"rdma_device": "mlx5_0", "tls_certificate": "node.pem"}, ConfigError),
    ],
)
async def test_a_node_that_cannot_start_says_why(
    tmp_path: Path, checkpoint: Path, settings: dict[str, Any], error: type[LambdaScaleError]
) -> None:
    async with nodes(tmp_path, checkpoint) as up:
        with nothing_left(), pytest.raises(error):
            await up.start("a", **settings)


async def test_a_port_in_use_says_so(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint) as up:
        with (
            socket.create_server(("127.0.0.1", 0)) as taken,
            pytest.raises(ConfigError, match="cannot listen on"),
        ):
            await up.start("a", port=taken.getsockname()[1])
        assert (await up.pool()).nodes == ()


async def test_an_engine_that_dies_ends_the_node_with_its_error(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint) as up, MemoryBus(up.broker, "a") as bus:

        async def live() -> None:
            config = up.config("a")
            async with NodeService(bus, config, RealParts(config)) as service:
                worker = service._worker
                assert isinstance(worker, Worker)
                worker._post(die)
                await asyncio.Event().wait()

        with nothing_left(), pytest.raises(ZeroDivisionError):
            async with asyncio.timeout(WAIT_S):
                await live()
        assert (await up.pool()).nodes == ()


async def test_a_data_plane_that_dies_ends_the_node(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint) as up, MemoryBus(up.broker, "a") as bus:

        async def broken() -> None:
            raise ZeroDivisionError("a bug in the data thread")

        async def live() -> None:
            config = up.config("a")
            async with NodeService(bus, config, RealParts(config)) as service:
                data = service._data
                assert isinstance(data, DataPlane)
                data._loop.call_soon_threadsafe(lambda: data._group.create_task(broken()))
                await asyncio.Event().wait()

        with nothing_left(), pytest.raises(BaseExceptionGroup) as caught:
            async with asyncio.timeout(WAIT_S):
                await live()
        assert caught.group_contains(ZeroDivisionError)


async def test_a_node_that_stops_fails_its_sequences_before_it_goes(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a", settings=SLOW) as up:
        await up.promoted("a")
        gone = Heard()
        await up.bus.subscribe(subjects.POOL_NODES, On(Message, gone.hear))
        await up.submit("a", max_tokens=400)
        await up.tokens.until(lambda: len(up.tokens_of("r")) >= 2)
        generation = up.info("a").generation
        await up.stop("a")
        await up.tokens.until(lambda: up.over("r"))
        failure = up.failure("r")
        assert failure is not None
        assert failure.code == "not_found"
        await gone.until(lambda: bool(gone.messages))
        reason = "it gave its lease back"
        (said,) = gone.messages
        assert isinstance(said, NodeGone)
        assert (said.node, said.generation) == (NodeId("a"), generation)
        assert (said.reason, said.graceful) == (reason, True)


async def test_ping_is_answered(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        assert await up.request(subjects.node_ping(NodeId("a")), Ping()) == Ok()


async def test_a_node_tells_what_happened_to_an_event_a_model_and_a_request(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.promoted("a")
        await up.generate("a", request="r")
        await up.release("a")

        async def told(subject: str) -> list[tuple[str, str]]:
            query = StoryQuery(subject=subject)
            answer: Told = await up.request(subjects.node_story(NodeId("a")), query, Told)
            assert all(0 <= wall_ns() - step.at_ns < WAIT_S * 1e9 for step in answer.steps)
            return [(step.cause, step.text) for step in answer.steps]

        event = [("promote-a", "follows revision 0"), ("promote-a", "active")]
        event += [("promote-a", f"runs block {block}") for block in ALL]
        assert sorted(await told("promote-a")) == sorted(event)
        of_model = await told(up.record.model_id)
        assert of_model[-1] == ("release_model", "gives its space back")
        assert ("r", "comes") in await told("r")
        assert await told("nobody") == []


async def test_a_node_says_what_made_it_speak(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        added: Heard = Heard()
        await up.bus.subscribe(subjects.POOL_MODELS, On(Message, added.hear))
        message = ImportModel(
            path=str(up.checkpoint), name=ModelName("again"), blocks=3, cause="me"
        )
        subject = subjects.node_import(NodeId("a"))
        imported: ModelImported = await up.request(subject, message, ModelImported)
        assert imported.cause == "me"
        await added.until(lambda: [each.cause for each in added.messages] == ["me"])
        await up.bus.publish(subjects.POOL_REPORT, ReportStatus(cause="restart"))
        await up.statuses.until(lambda: up.statuses.messages[-1].cause == "restart")


async def test_a_node_tells_where_it_is_and_how_fast(tmp_path: Path, checkpoint: Path) -> None:
    fabric: dict[str, Any] = {"rack": "r", "trunk_bytes_per_s": 3, "local_bytes_per_s": 2}
    async with nodes(tmp_path, checkpoint, "a", "b", settings=fabric) as up:
        assert (up.info("a").rack, up.info("a").trunk_bytes_per_s) == ("r", 3)
        assert up.info("a").local_bytes_per_s == 2
        await up.promoted("a")
        await up.apply("b", FROM_A)
        await up.until_arrived("b", ALL)
        await up.until_holds("b", {Tier.GPU: ALL})
        await up.statuses.until(
            lambda: (status := up.status("b")) is not None and status.profile.overhead_s > 0
        )
        promoted = up.status("a")
        assert promoted is not None
        assert promoted.profile.overhead_s == 0


async def test_requests_of_another_kind_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        node = NodeId("a")
        for subject in (subjects.node_plan, subjects.node_release, subjects.node_import):
            with pytest.raises(BadMessage, match="not ModelsQuery"):
                await up.request(subject(node), ModelsQuery())


# --- generations ------------------------------------------------------------------


async def test_a_node_on_a_clock_that_went_back_is_the_later_process(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        before = up.info("a")
        yesterday = clock.wall_ns() - 86_400 * 10**9
        await up.stop("a")
        with monkeypatch.context() as patch:
            patch.setattr(clock, "wall_source", lambda: yesterday)
            await up.start("a")
        assert up.info("a").generation > before.generation


async def test_a_node_that_was_declared_gone_goes_on_as_a_new_one(
    tmp_path: Path, checkpoint: Path
) -> None:
    """It happens in the midst of a plan. The node keeps its blocks and reports them under the new
    generation."""
    async with nodes(tmp_path, checkpoint, "a", "b", settings={"lease_s": 1}) as up:
        await up.apply("a", promote=(0, 1, 2))
        await up.apply("b", FROM_A)
        await up.until_arrived("b", (0, 1, 2))
        old = up.info("b")
        plan = up.plan("b", FROM_A, revision=1)
        joined = Heard()
        await up.bus.subscribe(subjects.POOL_NODES, On(Message, joined.hear))
        gone = NodeGone(node=old.node, generation=old.generation, reason="test")
        await up.bus.publish(subjects.POOL_NODES, gone)
        await up.statuses.until(
            lambda: (
                (status := up.status("b")) is not None
                and status.generation == up.info("b").generation > old.generation
            )
        )
        await joined.until(
            lambda: any(
                isinstance(said, NodeJoined) and said.info == up.info("b")
                for said in joined.messages
            )
        )
        with pytest.raises(StaleEpoch, match="has generation"):
            await up.request(subjects.node_plan(old.node), plan)
        release = ReleaseModel(
            node=old.node, generation=old.generation, model_id=plan.model_id, keep=None
        )
        with pytest.raises(StaleEpoch, match="has generation"):
            await up.request(subjects.node_release(old.node), release)
        await up.apply("a", promote=(3, 4, 5), revision=1)
        late = [m for m in await up.until_arrived("b", ALL) if m.block in (3, 4, 5)]
        assert {m.generation for m in late} == {up.info("b").generation}
        await up.until_holds("b", {Tier.GPU: ALL})
        await up.bus.publish(subjects.POOL_NODES, gone)  # said again: of another node by now
        await up.apply("b", FROM_A, event="ev-2")


# --- imports ----------------------------------------------------------------------


def broken(checkpoint: Path, into: Path, config: dict[str, object]) -> Path:
    into.mkdir()
    for path in checkpoint.iterdir():
        (into / path.name).write_bytes(path.read_bytes())
    old = msgspec.json.decode((into / "config.json").read_bytes())
    (into / "config.json").write_bytes(msgspec.json.encode(old | config))
    return into


async def test_bad_imports_are_typed_errors_and_harm_nothing(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        other = broken(checkpoint, tmp_path / "other", {"architectures": ["BertModel"]})
        with pytest.raises(UnsupportedModel):
            await up.import_model(path=other, called="bert")
        narrow = broken(checkpoint, tmp_path / "narrow", {"hidden_size": 128})
        with pytest.raises((ModelError, CorruptCheckpoint)):
            await up.import_model(path=narrow, called="narrow")
        with pytest.raises(LambdaScaleError, match="nowhere"):
            await up.import_model(path=tmp_path / "nowhere")
        with pytest.raises(BadInput, match="not valid"):
            await up.import_model(called="no spaces")
        for blocks in (-1, 1000):
            with pytest.raises(BadInput):
                await up.import_model(blocks=blocks)
        with pytest.raises(Conflict, match="is published as 'tiny' already"):
            await up.import_model(called="tiny-2")
        await up.until_holds("a", {Tier.DISK: ALL})
        await up.promoted("a")
        assert len(await up.generate("a")) == 8


async def test_importing_twice_is_importing_once(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.promoted("a")
        tokens = await up.generate("a", request="before")
        again = await asyncio.gather(up.import_model(), up.import_model())
        assert {record.model_id for record in again} == {up.record.model_id}
        models: Models = await up.request(subjects.REGISTRY_MODELS, ModelsQuery(), Models)
        assert models.records == (up.record,)
        assert up.record.chunk_bytes == chunk_bytes(up.record.nbytes)
        assert await up.generate("a", request="after") == tokens


async def test_an_upload_that_fails_can_be_tried_again(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint) as up:
        bus = Trouble(up.broker, "a")
        await up.start("a", bus=bus)
        bus.refused.add(subjects.OBJECTS)
        with pytest.raises(BusTimeout, match="asset store"):
            await up.import_model()
        models: Models = await up.request(subjects.REGISTRY_MODELS, ModelsQuery(), Models)
        assert models.records == ()
        bus.refused.clear()
        up.record = await up.import_model()
        await up.promoted("a")


async def test_a_node_that_starts_offers_what_lies_on_its_disk(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.stop("a")
        await up.start("a")
        await up.until_holds("a", {Tier.DISK: ALL})
        await up.promoted("a")


# --- what others say that is wrong --------------------------------------------------


async def test_a_published_model_whose_manifest_cannot_be_had_harms_nothing(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        objects = await up.bus.objects()
        garbage = await objects.put(b"not a manifest")
        with capture_logs() as logs:
            for manifest, model in ((garbage, "1" * 32), ("0" * 64, "2" * 32)):
                record = msgspec.structs.replace(up.record, manifest=manifest, model_id=model)
                await up.bus.publish(subjects.POOL_MODELS, ModelAdded(record=record))
            swapped = msgspec.structs.replace(up.record, model_id="3" * 32)
            await up.bus.publish(subjects.POOL_MODELS, ModelAdded(record=swapped))
            await up.promoted("a")
            await up.apply("b", FROM_A)
            await up.until_arrived("b", ALL)
        said = [log for log in logs if log["event"] == "learning a model failed"]
        assert {log["code"] for log in said} == {"corrupt_checkpoint", "not_found"}


async def test_a_peer_with_a_bad_address_harms_nothing(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        with capture_logs() as logs:
            for address in ("", "tcp://:0", "tcp://127.0.0.1:1"):
                info = msgspec.structs.replace(up.info("a"), node=NodeId("x"), address=address)
                await up.bus.publish(subjects.POOL_NODES, NodeJoined(info=info))
            await up.promoted("a")
        assert "connecting to x failed" in {log["event"] for log in logs}


# --- peers ------------------------------------------------------------------------


async def test_a_peer_that_dies_is_a_suspect_and_what_it_took_part_in_ends(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b", settings=SLOW) as up:
        await up.promoted("a")
        await up.apply("b", FROM_A)
        await up.until_arrived("b", ALL)
        await up.submit("a", "b", max_tokens=400)
        await up.tokens.until(lambda: len(up.tokens_of("r")) >= 2)
        # Its data plane goes, as if the process had: the lease has not ended yet.
        data = up.services["b"]._data
        assert isinstance(data, DataPlane)
        await data._close()
        await up.suspects.until(lambda: bool(up.suspects.messages))
        suspect = up.suspects.messages[0]
        assert isinstance(suspect, PeerSuspect)
        assert (suspect.reporter, suspect.node) == ("a", "b")
        await up.tokens.until(lambda: up.over("r"))
        failure = up.failure("r")
        assert failure is not None
        assert failure.code == "peer_lost"


async def test_connections_ahead_of_need_are_few_and_to_the_nearest(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, str]] = []
    heard = Heard()

    async def connect(data: DataPlane, address: str) -> None:
        made.append((data.address, address))
        await heard.hear(Ok())

    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.start("b", rack="r1")
        await up.start("c", machine="elsewhere")
        monkeypatch.setattr(DataPlane, "connect", connect)
        await up.bus.subscribe(subjects.POOL_NODES, On(Message, heard.hear))
        x = await up.start("x", machine="elsewhere", rack="r1", mesh_peers=2)
        near = [(x.info.address, up.info(name).address) for name in "cb"]
        await heard.until(lambda: set(near) <= set(made))
        await up.stop("c")
        await heard.until(lambda: any(isinstance(m, NodeGone) for m in heard.messages))
        late = msgspec.structs.replace(up.info("a"), node=NodeId("y"), address="tcp://y")
        await up.bus.publish(subjects.POOL_NODES, NodeJoined(info=late))
        await heard.until(lambda: (x.info.address, "tcp://y") in made)
        assert [to for by, to in made if by == x.info.address] == [to for _, to in near] + [
            "tcp://y"
        ]


async def test_an_old_farewell_does_not_part_from_the_node_that_came_back(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b", settings=SLOW) as up:
        await up.promoted("a")
        await up.apply("b", FROM_A)
        await up.until_arrived("b", ALL)
        await up.submit("a", "b", max_tokens=30)
        info = up.info("b")
        before = Generation(info.generation - 1)
        gone = NodeGone(node=info.node, generation=before, reason="long ago")
        await up.bus.publish(subjects.POOL_NODES, gone)
        await up.tokens.until(lambda: up.over("r"))
        assert up.failure("r") is None
        await up.submit("a", "b", request="r2", max_tokens=400)
        await up.tokens.until(lambda: len(up.tokens_of("r2")) >= 2)
        gone = NodeGone(node=info.node, generation=info.generation, reason="now")
        await up.bus.publish(subjects.POOL_NODES, gone)
        await up.tokens.until(lambda: up.over("r2"))
        assert up.failure("r2") is not None


# --- a bus that fails ---------------------------------------------------------------


async def test_reports_that_cannot_be_sent_cost_nothing_but_themselves(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        bus = Trouble(up.broker, "b")
        await up.start("b", bus=bus)
        bus.refused |= {subjects.ARRIVALS, subjects.POOL_STATUS}
        await up.promoted("a")
        await up.apply("b", FROM_A)
        await bus.until_lost(subjects.ARRIVALS, len(ALL))
        assert up.arrived("b") == []
        bus.refused.clear()
        await up.until_holds("b", {Tier.GPU: ALL})
        assert await up.generate("b", request="on b") == await up.generate("a", request="on a")


async def test_tokens_leave_in_the_order_they_were_drawn(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.promoted("a")
        await asyncio.gather(*(up.submit("a", request=f"r{i}", max_tokens=60) for i in range(8)))
        await up.tokens.until(lambda: all(up.over(f"r{i}") for i in range(8)))
        for i in range(8):
            tokens = up.tokens_of(f"r{i}")
            assert [t.index for t in tokens] == list(range(len(tokens)))
            assert [bool(t.finish) for t in tokens] == [False] * (len(tokens) - 1) + [True]
