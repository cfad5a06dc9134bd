"""What a local cluster's services are forked from: they are processes like any others."""

import errno
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from services.local import processes
from services.local.forking import PROGRAM, fork_server
from services.local.nats_server import NatsServer
from shared.errors import StartFailed
from shared.fork_server import Server
from shared.forking import Forked, ForkServer, Order


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


def log_of(directory: Path, name: str) -> Path:
    return processes.log_of(directory, name)


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[ForkServer]:
    log = log_of(directory, "server")
    log.parent.mkdir()
    server = fork_server(log, processes.environment(directory, {}))
    yield server
    server.stop()


def order(directory: Path, name: str, *words: str, **settings: str) -> Order:
    return Order(
        name,
        PROGRAM,
        words,
        {**processes.environment(directory, {}), **settings},
        str(log_of(directory, name)),
    )


def registry(server: ForkServer, directory: Path, nats: NatsServer, name: str) -> Forked:
    """A service that lasts."""
    return server.fork(order(directory, name, "registry", LAMBDASCALE_BUS_URL=nats.url))


async def test_a_process_has_its_settings_its_log_and_its_exit_code(
    server: ForkServer, directory: Path
) -> None:
    await server.ready()
    helped = server.fork(order(directory, "help", "registry", "--help"))
    refused = server.fork(order(directory, "refused", "node", LAMBDASCALE_NODE_SLOTS="x"))
    assert await helped.ended() == helped.poll() == helped.wait() == 0
    assert "Runs one registry" in log_of(directory, "help").read_text()
    assert await refused.ended() == refused.poll() == refused.wait() == 2
    assert "LAMBDASCALE_NODE_SLOTS" in log_of(directory, "refused").read_text()


async def test_a_process_is_found_by_its_mark_and_leads_a_session(
    server: ForkServer, directory: Path, nats_server: NatsServer
) -> None:
    found = registry(server, directory, nats_server, "found")
    other = registry(server, directory, nats_server, "other")
    assert found.poll() is None
    assert {found.pid, other.pid} < set(processes.strays(directory))
    assert os.getsid(found.pid) == found.pid
    with pytest.raises(TimeoutError):
        found.wait(0.01)
    os.kill(found.pid, signal.SIGKILL)
    assert await found.ended() == -signal.SIGKILL
    assert other.poll() is None
    os.kill(other.pid, signal.SIGTERM)
    assert await other.ended() in (0, -signal.SIGTERM)  # as a service, or before it was one


async def test_what_is_forked_dies_with_its_server_and_the_next_is_forked_from_another(
    server: ForkServer, directory: Path, nats_server: NatsServer
) -> None:
    dies = registry(server, directory, nats_server, "dies")
    (parent,) = set(processes.strays(directory)) - {dies.pid}
    os.kill(parent, signal.SIGKILL)
    assert await dies.ended() == -signal.SIGKILL
    assert not processes.strays(directory)
    await server.ready()
    after = server.fork(order(directory, "after", "registry", "--help"))
    assert await after.ended() == 0


async def test_told_to_end_it_waits_for_what_it_has_forked(
    server: ForkServer, directory: Path, nats_server: NatsServer
) -> None:
    waits = registry(server, directory, nats_server, "waits")
    (parent,) = set(processes.strays(directory)) - {waits.pid}
    os.kill(parent, signal.SIGTERM)
    more = server.fork(order(directory, "more", "registry", "--help"))
    assert await more.ended() == 0
    assert waits.poll() is None
    os.kill(waits.pid, signal.SIGKILL)
    assert await waits.ended() == -signal.SIGKILL


async def test_one_that_cannot_import_says_where_to_look(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise ImportError('broken')")
    broken = fork_server(tmp_path / "log", {**os.environ, "PYTHONPATH": str(tmp_path)})
    with pytest.raises(StartFailed, match=str(tmp_path / "log")):
        await broken.ready()
    assert "broken" in (tmp_path / "log").read_text()
    with pytest.raises(StartFailed, match=str(tmp_path / "log")):
        broken.fork(Order("a", PROGRAM, ("registry",), {}, str(tmp_path / "a")))
    broken.stop()


def test_a_fork_that_fails_costs_nobody_else_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(os, "fork", refuse)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    data = msgspec.msgpack.encode(Order("a", PROGRAM, ("registry",), {}, str(tmp_path / "a")))
    with status:
        socket.send_fds(ours, [data], [status.fileno()])
    ours.shutdown(socket.SHUT_WR)
    with theirs, ours:
        assert Server(theirs).follow() is None  # to the end of the orders
    with told:
        assert int.from_bytes(told.recv(8), "little", signed=True) == -errno.EAGAIN
