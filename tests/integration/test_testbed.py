"""Hosts as network namespaces: how they are wired, and that nothing is left of them."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.testbed import (
    Namespace,
    Testbed,
    Wiring,
    check_able,
    control_address,
    data_address,
)
from shared.errors import BadInput, ConfigError

TCP_CONGESTION = 13
PAYLOAD = 300_000
VICTIM = """
import sys
from benchmarks.testbed import Testbed, Wiring
with Testbed(Wiring(hosts=2, link_mbit=100)) as bed:
    for namespace in (bed.hub, *bed.hosts):
        print(namespace.start(["sleep", "1000"]).pid)
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _able() -> None:
    try:
        check_able()
    except ConfigError as error:
        pytest.skip(str(error))


def move(source: Namespace, target: Namespace, address: str) -> bytes:
    """Sends PAYLOAD bytes to the address; returns the algorithm that the connection keeps to."""
    with target.entered(), listening(address) as listener:
        port = listener.getsockname()[1]
        with source.entered():
            sender = socket.create_connection((address, port))
        receiver, _ = listener.accept()
        with sender, receiver:
            sender.sendall(bytes(PAYLOAD))
            sender.shutdown(socket.SHUT_WR)
            received = 0
            while data := receiver.recv(1 << 20):
                received += len(data)
            assert received == PAYLOAD
            return sender.getsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, 16).rstrip(b"\0")


def listening(address: str) -> socket.socket:
    return socket.create_server((address, 0))


def shape(namespace: Namespace, device: str) -> tuple[int, int]:
    """(bytes/s, bytes that went through) of a device's shaper."""
    process = namespace.start(
        ["tc", "-s", "-j", "qdisc", "show", "dev", device], stdout=subprocess.PIPE
    )
    output, _ = process.communicate()
    (found,) = [q for q in json.loads(output) if q["kind"] == "tbf"]
    return found["options"]["rate"], found["bytes"]


def namespaces_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def holders(names: set[str]) -> list[str]:
    """What keeps one of the namespaces alive: processes in it, and open files."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [process / "ns/net", *(process / "fd").iterdir()]
        except OSError:
            continue
        for link in links:
            try:
                if os.readlink(link) in names:
                    found.append(str(link))
            except OSError:
                continue
    return found


def test_links_are_shaped_at_both_ends_and_control_is_not() -> None:
    with Testbed(Wiring(hosts=2, link_mbit=80)) as bed:
        assert move(bed.hosts[0], bed.hosts[1], data_address(1)) == b"cubic"
        out, into = shape(bed.hosts[0], "data"), shape(bed.hub, "data1")
        assert out[0] == into[0] == 10_000_000
        assert min(out[1], into[1]) > PAYLOAD
        before = shape(bed.hosts[0], "data")
        move(bed.hosts[0], bed.hosts[1], control_address(1))
        assert shape(bed.hosts[0], "data") == before


def test_racks_reach_each_other_through_their_trunks_alone() -> None:
    wiring = Wiring(hosts=4, link_mbit=80, racks=(2, 2), trunk_mbit=40)
    with Testbed(wiring) as bed:
        trunks = ("down0", "up0", "down1", "up1")
        assert {shape(bed.hub, trunk)[0] for trunk in trunks} == {5_000_000}
        move(bed.hosts[0], bed.hosts[1], data_address(1))
        assert all(shape(bed.hub, trunk)[1] < PAYLOAD for trunk in trunks)
        move(bed.hosts[0], bed.hosts[2], data_address(2))
        crossed = {trunk for trunk in trunks if shape(bed.hub, trunk)[1] > PAYLOAD}
        assert crossed == {"down0", "up1"}  # out of rack 0, into rack 1


def test_a_thread_is_back_where_it_was() -> None:
    before = namespaces_of(os.getpid())
    with Testbed(Wiring(hosts=1, link_mbit=80)) as bed, bed.hub.entered():
        assert namespaces_of(os.getpid()) != before
    assert namespaces_of(os.getpid()) == before


def test_nothing_is_left_after_use() -> None:
    with Testbed(Wiring(hosts=2, link_mbit=80)) as bed:
        process = bed.hosts[0].start(["sleep", "1000"])
        names = {os.readlink(namespace.path) for namespace in (bed.hub, *bed.hosts)}
        process.kill()
        process.wait()
    assert len(names) == 3
    assert not holders(names)


def test_nothing_is_left_after_sigkill() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as victim:
        assert victim.stdout is not None
        pids = [int(victim.stdout.readline()) for _ in range(3)]
        assert victim.stdout.readline() == "ready\n"
        names = {namespaces_of(pid) for pid in pids}
        assert len(names) == 3
        assert namespaces_of(os.getpid()) not in names
        watched = [os.pidfd_open(pid) for pid in pids]
        os.kill(victim.pid, signal.SIGKILL)
        for descriptor in watched:
            assert select.select([descriptor], [], [], 20)[0]
            os.close(descriptor)
    assert not holders(names)


@pytest.mark.parametrize(
    "wiring",
    [
        {"hosts": 0, "link_mbit": 1},
        {"hosts": 2, "link_mbit": 0},
        {"hosts": 3, "link_mbit": 1, "racks": (2, 2), "trunk_mbit": 1},
        {"hosts": 4, "link_mbit": 1, "racks": (2, 2)},
    ],
)
def test_wiring_that_makes_no_sense_is_refused(wiring: dict[str, float]) -> None:
    with pytest.raises(BadInput):
        Wiring(**wiring)  # type: ignore[arg-type]


def test_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="root"), Testbed(Wiring(hosts=1, link_mbit=1)):
        pass


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="iproute2"), Testbed(Wiring(hosts=1, link_mbit=1)):
        pass
