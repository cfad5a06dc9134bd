"""How a node on the bus starts, answers and ends."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from services.node.engine.engine import TorchEngine
from services.node.execution.steps import Steps
from services.node.execution.worker import Worker
from services.node.moving.data_plane import DataPlane
from services.node.real_parts import RealParts
from services.node.service import NodeService
from shared import subjects
from shared.bus.base import On
from shared.bus.memory import MemoryBus
from shared.clock import wall_ns
from shared.errors import (
    BadMessage,
    CapacityExceeded,
    ConfigError,
    Conflict,
    EngineFailed,
    LambdaScaleError,
)
from shared.ids import ModelName, NodeId
from shared.messages import Message, Ok, Ping
from shared.messages.pool import ModelsQuery, NodeGone, ReportStatus, Tier
from shared.messages.scaling import ImportModel, ModelImported
from shared.messages.story import StoryQuery, Told
from tests.unit.node.cluster import ALL, Heard, Nodes, nodes
from tests.unit.node.service.builders import FROM_A, SLOW, WAIT_S


def die(_: Steps) -> None:
    raise ZeroDivisionError("a bug in the engine thread")


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


async def test_an_engine_that_hangs_makes_the_node_unfit_which_gives_its_requests_back_and_ends(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, release = threading.Event(), threading.Event()
    told = []

    def hang(*_: Any) -> Any:
        entered.set()
        release.wait()
        raise RuntimeError("the engine woke up")

    async with nodes(tmp_path, checkpoint, "a") as up:
        gone = Heard()
        await up.bus.subscribe(subjects.POOL_NODES, On(NodeGone, gone.hear))

        async def live() -> None:
            config = up.config("b", engine_timeout_s=1.0)
            parts = RealParts(config)
            async with (
                MemoryBus(up.broker, "b") as bus,
                NodeService(bus, config, parts, hung=lambda: told.append("hung")) as service,
            ):
                up.services["b"] = service
                await up.apply("b", dict.fromkeys(ALL, "a"))
                await up.until_arrived("b", ALL)
                monkeypatch.setattr(TorchEngine, "begin", hang)
                await up.submit("b")
                await asyncio.Event().wait()

        with pytest.raises(EngineFailed, match="unfit: its engine has been at"):
            await asyncio.wait_for(live(), WAIT_S)
        del up.services["b"]
        release.set()
        assert entered.is_set()
        assert told == ["hung"]
        await up.tokens.until(lambda: up.over("r"))
        failure = up.failure("r")
        assert failure is not None
        assert failure.code == EngineFailed.code
        await up.statuses.until(lambda: bool((status := up.status("b")) and status.unfit))
        await gone.until(lambda: bool(gone.messages))


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
    settings = {**SLOW, "evacuate_s": 0}  # it does not wait until they end
    async with nodes(tmp_path, checkpoint, "a", settings=settings) as up:
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
            return [(step.cause, step.text.split(": ")[0]) for step in answer.steps]

        event = [("promote-a", "follows revision 0"), ("promote-a", "active")]
        event += [("promote-a", f"block {block} came from a (disk)") for block in ALL]
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
