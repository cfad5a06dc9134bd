"""A node's peers: bad addresses, losses, connections ahead of need."""

from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from services.node.moving.data_plane import DataPlane
from shared import subjects
from shared.bus.base import On
from shared.ids import Generation, NodeId
from shared.messages import Message, Ok
from shared.messages.pool import NodeGone, NodeJoined
from shared.messages.scaling import PeerSuspect
from tests.unit.node.cluster import ALL, Heard, nodes
from tests.unit.node.service.builders import FROM_A, SLOW


async def test_a_peer_with_a_bad_address_harms_nothing(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        with capture_logs() as logs:
            for address in ("", "tcp://:0", "tcp://127.0.0.1:1"):
                info = msgspec.structs.replace(up.info("a"), node=NodeId("x"), address=address)
                await up.bus.publish(subjects.POOL_NODES, NodeJoined(info=info))
            await up.promoted("a")
        assert "connecting to x failed" in {log["event"] for log in logs}


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
