"""Who is let in, and what a configuration must have. That bytes cross is the contract suite's."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from services.node.transport.base import NoListener
from services.node.transport.tcp import TcpTransport
from services.node.transport.tls import Tls, load
from shared.errors import ConfigError, PeerLost
from tests.support.tls import DIRECTORY, certificates

FILES = str(DIRECTORY / "ours-node.pem"), str(DIRECTORY / "ours-node.key")
AUTHORITY = str(DIRECTORY / "ours-authority.pem")


def node(tls: Tls | None) -> TcpTransport:
    return TcpTransport(
        "127.0.0.1",
        0,
        link_bytes_per_s=0,
        tls=tls,
        listener=NoListener(),
    )


@pytest.mark.parametrize(
    "stranger",
    [
        pytest.param(lambda: None, id="without TLS"),
        pytest.param(lambda: certificates("others", "ours"), id="of another authority"),
        pytest.param(lambda: certificates("ours", "others"), id="trusting another authority"),
    ],
)
async def test_strangers_do_not_connect_either_way(stranger: Callable[[], Tls | None]) -> None:
    async with node(certificates()) as ours, node(stranger()) as other, asyncio.timeout(10):
        for dialler, listener in ((other, ours), (ours, other)):
            with pytest.raises(PeerLost):
                await dialler.connect(listener.address)
        async with node(certificates()) as friend:
            await friend.connect(ours.address)


async def test_a_stranger_sees_nothing_in_the_clear() -> None:
    """What crosses the wire holds no region's name and none of its bytes."""
    secret = b"weights worth hiding" * 100
    seen = bytearray()
    async with node(certificates()) as source, node(certificates()) as reader:
        source.register("the-region", memoryview(secret), ready=len(secret))
        port = int(source.address.rpartition(":")[2])

        async def relay(a: asyncio.StreamReader, b: asyncio.StreamWriter) -> None:
            while data := await a.read(65536):
                seen.extend(data)
                b.write(data)
            b.close()

        async def accept(near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
            far, to_far = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(relay(near, to_far), relay(far, to_near))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        into = memoryview(bytearray(len(secret)))
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await reader.read(address, "the-region", 0, into, priority=1)
        server.close()
        assert into == secret
        assert len(seen) > len(secret)
        assert b"worth" not in seen
        assert b"the-region" not in seen


def test_no_files_are_no_tls() -> None:
    assert load("", "", "") is None


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"needs node.tls_key, node.tls_authority too"):
        load(FILES[0], "", "")


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        load(*FILES, str(tmp_path / "nowhere"))
    (tmp_path / "junk").write_text("junk")
    with pytest.raises(ConfigError, match="cannot be used"):
        load(str(tmp_path / "junk"), FILES[1], AUTHORITY)


async def test_a_dialler_that_is_gone_before_the_handshake_harms_nothing() -> None:
    async with node(certificates()) as ours, node(certificates()) as friend:
        port = int(ours.address.rpartition(":")[2])
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        async with asyncio.timeout(10):
            await friend.connect(ours.address)
