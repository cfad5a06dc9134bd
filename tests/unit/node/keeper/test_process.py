"""A real keeper over its real socket: what it holds outlives processes, and nonsense."""

import asyncio
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from services.node.keeper.link import Estate, KeeperLink
from services.node.keeper.messages import LARGEST, Claim, Drop, Hold, Space, encode
from shared.ids import NodeId

NODE = NodeId("node-0")
LIMIT_S = 30.0
OWNER = """
import asyncio, os, sys
from pathlib import Path
from services.node.keeper.link import KeeperLink
from services.node.keeper.messages import Space
from shared.ids import Generation, NodeId

async def main():
    link = KeeperLink(Path(sys.argv[1]), NodeId("node-0"), 60.0)
    estate = await link.claim()
    if not estate.memories:
        memory = os.memfd_create("arena")
        os.write(memory, b"weights" + bytes(4089))
        link.hold("arena", memory, 4096, "as they were")
        link.note(Space("arena", "model", 0, 4096, (0, 1), True))
    stay = asyncio.create_task(link.stay())
    link.works_as(Generation(int(sys.argv[2])))
    print("owner", sorted(estate.memories), flush=True)
    if await asyncio.to_thread(sys.stdin.readline) == "forget\\n":
        link.forget("arena", "model")
        return
    await stay

asyncio.run(main())
"""


@pytest.fixture
async def directory(tmp_path: Path) -> AsyncIterator[Path]:
    """A node's data directory, with a path that is too long for a socket's address."""
    long = tmp_path / ("d" * 100)
    long.mkdir()
    yield long
    if (pid := keeper_of(long)) is not None:
        os.kill(pid, signal.SIGTERM)
        await ended(long)


def keeper_of(directory: Path) -> int | None:
    """The process that holds the keeper's lock."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"services.node.keeper" in words and str(directory).encode() in words:
                return int(entry.name)
    return None


async def ended(directory: Path) -> None:
    """Waits for the end of the keeper."""
    pid = keeper_of(directory)
    if pid is None:
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, over.set)
    async with asyncio.timeout(LIMIT_S):
        await over.wait()
    asyncio.get_running_loop().remove_reader(descriptor)
    os.close(descriptor)


@contextmanager
def owner(directory: Path, generation: int) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", OWNER, str(directory), str(generation)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout
    return process.stdout.readline()


async def claimed(directory: Path, keep_s: float = 60.0) -> tuple[KeeperLink, Estate]:
    link = KeeperLink(directory, NODE, keep_s)
    async with asyncio.timeout(LIMIT_S):
        return link, await link.claim()


def bytes_of(estate: Estate, memory: str) -> bytes:
    kept = estate.memories[memory]
    with mmap.mmap(kept.descriptor, kept.nbytes) as seen:
        return seen[:7]


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "SIGSTOP"])
async def test_what_a_killed_process_held_goes_to_the_next_once_it_is_dead(
    directory: Path, stopped: bool
) -> None:
    """A process that hangs is killed by the keeper, before the next one has its memory."""
    with owner(directory, 7) as first:
        assert await asyncio.to_thread(said, first) == "owner []\n"
        if stopped:
            first.send_signal(signal.SIGSTOP)
        else:
            first.kill()
        link, estate = await claimed(directory)
        assert await asyncio.to_thread(first.wait, LIMIT_S) == -signal.SIGKILL
        assert bytes_of(estate, "arena") == b"weights"
        assert estate.memories["arena"].about == "as they were"
        assert estate.spaces == [Space("arena", "model", 0, 4096, (0, 1), True)]
        assert estate.generations == {7}
        estate.close()
        link.close()


async def test_a_process_that_is_at_work_keeps_its_place_and_the_next_stands_by(
    directory: Path,
) -> None:
    with owner(directory, 1) as first:
        assert await asyncio.to_thread(said, first) == "owner []\n"
        waits = asyncio.Event()
        link = KeeperLink(directory, NODE, 60.0)
        claim = asyncio.create_task(link.claim(waits.set))
        async with asyncio.timeout(LIMIT_S):
            await waits.wait()
        assert not claim.done()
        first.kill()
        async with asyncio.timeout(LIMIT_S):
            estate = await claim
        assert list(estate.memories) == ["arena"]
        estate.close()
        link.close()


async def test_an_owner_that_is_long_dead_need_not_be_killed(directory: Path) -> None:
    """The keeper hears of the end of its connection, and then that there is no such process."""
    with owner(directory, 1) as first:
        assert await asyncio.to_thread(said, first) == "owner []\n"
        waits = asyncio.Event()
        link = KeeperLink(directory, NODE, 60.0)
        claim = asyncio.create_task(link.claim(waits.set))
        async with asyncio.timeout(LIMIT_S):
            await waits.wait()
        keeper = keeper_of(directory)
        assert keeper is not None
        os.kill(keeper, signal.SIGSTOP)
        first.kill()
        await asyncio.to_thread(first.wait, LIMIT_S)
        os.kill(keeper, signal.SIGCONT)
        async with asyncio.timeout(LIMIT_S):
            estate = await claim
        assert list(estate.memories) == ["arena"]
        assert "No such process" not in (directory / "keeper.log").read_text()
        estate.close()
        link.close()


async def test_what_a_process_said_before_its_death_counts(directory: Path) -> None:
    """The keeper reads it, even if it comes to it only afterwards."""
    with owner(directory, 1) as first:
        assert await asyncio.to_thread(said, first) == "owner []\n"
        keeper = keeper_of(directory)
        assert keeper is not None
        os.kill(keeper, signal.SIGSTOP)
        assert first.stdin
        await asyncio.to_thread(first.communicate, "forget\n", LIMIT_S)
        os.kill(keeper, signal.SIGCONT)
    link, estate = await claimed(directory)
    assert list(estate.memories) == ["arena"]
    assert estate.spaces == []
    estate.close()
    link.close()


async def test_memories_that_nobody_comes_for_are_freed(directory: Path) -> None:
    link, _ = await claimed(directory, keep_s=0.2)
    memory = os.memfd_create("arena")
    os.ftruncate(memory, 4096)
    link.hold("arena", memory, 4096)
    os.close(memory)
    assert keeper_of(directory) is not None
    link.close()
    await ended(directory)
    assert "frees the memories" in (directory / "keeper.log").read_text()
    assert not (directory / "keeper.sock").exists()


async def test_the_end_of_the_cluster_is_the_end_of_the_keeper(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = await asyncio.create_subprocess_exec("sleep", "1000")
    monkeypatch.setenv("LS_HOLDER", str(holder.pid))
    link, _ = await claimed(directory)
    assert keeper_of(directory) is not None
    holder.kill()
    await holder.wait()
    await ended(directory)
    link.close()


HOSTILE: dict[str, list[bytes]] = {
    "no JSON": [b"\xff\xfe"],
    "no message": [b'{"type": "claim"}'],
    "a message of the keeper": [b'{"type": "granted"}'],
    "too long": [b"x" * (LARGEST + 1)],
    "another node": [encode(Claim("node-1"))],
    "what only the owner may say": [encode(Drop("arena"))],
    "a huge number": [b'{"type":"alive","generation":99999999999999999999999}'],
}
OWNERS: dict[str, list[bytes]] = {
    "no memory with it": [encode(Hold("a", 4096))],
    "a negative number": [b'{"type":"hold","memory":"a","nbytes":-1}'],
    "a place in no memory": [encode(Space("nowhere", "m", 0, 1))],
    "a place outside": [encode(Space("arena", "m", 4096, 1))],
    "nothing": [],
}
TALK = """
import signal, sys
from pathlib import Path
from services.node.keeper.sockets import new_socket, short_path

connection = new_socket()
with short_path(Path(sys.argv[1])) as path:
    connection.connect(path)
for line in sys.stdin:
    connection.send(bytes.fromhex(line))
while told := connection.recv(65536):
    print(told.decode(), flush=True)
if sys.argv[2] == "stays":
    signal.pause()
"""


@contextmanager
def talking(
    directory: Path, *messages: bytes, then: str = "ends"
) -> Iterator["subprocess.Popen[str]"]:
    """A process that says something, and prints what it is told until its connection ends. Then it
    ends, or stays."""
    command = [sys.executable, "-c", TALK, str(directory), then]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin
        process.stdin.write("".join(message.hex() + "\n" for message in messages))
        process.stdin.close()
        try:
            yield process
        finally:
            process.kill()


def descriptors(directory: Path) -> int:
    """How many the keeper has open."""
    return len(os.listdir(f"/proc/{keeper_of(directory)}/fd"))


@pytest.mark.parametrize("messages", HOSTILE.values(), ids=HOSTILE.keys())
async def test_nonsense_ends_its_connection_and_nothing_else(
    directory: Path, messages: list[bytes]
) -> None:
    with owner(directory, 1) as first:
        assert await asyncio.to_thread(said, first) == "owner []\n"
        for _ in range(2):
            with talking(directory, encode(Claim(NODE))) as stands_by:
                assert "waits" in await asyncio.to_thread(said, stands_by)
                before = descriptors(directory)
        with talking(directory, *messages) as hostile:
            assert hostile.stdout
            told = await asyncio.to_thread(hostile.stdout.read)
            assert '"refused"' in told
            assert hostile.wait(LIMIT_S) == 0
        with talking(directory, encode(Claim(NODE))) as stands_by:
            assert "waits" in await asyncio.to_thread(said, stands_by)
            assert descriptors(directory) == before
        assert first.poll() is None


@pytest.mark.parametrize("messages", OWNERS.values(), ids=OWNERS.keys())
async def test_nonsense_of_the_owner_ends_its_tenure_and_what_is_held_stays(
    directory: Path, messages: list[bytes]
) -> None:
    with owner(directory, 1) as first:
        assert await asyncio.to_thread(said, first) == "owner []\n"
    with talking(directory, encode(Claim(NODE)), *messages, then="stays") as second:
        told = [await asyncio.to_thread(said, second) for _ in range(3 + bool(messages))]
        kinds = ["held", "space", "granted", "refused"][: len(told)]
        assert [kind in line for kind, line in zip(kinds, told, strict=True)] == [True] * len(told)
        second.send_signal(signal.SIGSTOP)
        link, estate = await claimed(directory)
        assert second.wait(LIMIT_S) == -signal.SIGKILL
    assert bytes_of(estate, "arena") == b"weights"
    assert len(estate.spaces) == 1
    estate.close()
    link.close()


async def test_a_keeper_of_another_user_is_not_believed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with owner(directory, 1) as first:
        assert await asyncio.to_thread(said, first) == "owner []\n"
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        link, estate = await claimed(directory)
        assert (link.there, estate.memories) == (False, {})


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be somebody else")
async def test_another_user_is_turned_away(directory: Path) -> None:
    with owner(directory, 1) as first:
        assert await asyncio.to_thread(said, first) == "owner []\n"
        for folder in (directory, *directory.parents):
            folder.chmod(folder.stat().st_mode | 0o055)
        (directory / "keeper.sock").chmod(0o777)
        code = TALK.replace("connection = new", "import os; os.setuid(12345)\nconnection = new")
        done = await asyncio.to_thread(
            partial(
                subprocess.run, [sys.executable, "-c", code, str(directory)], timeout=LIMIT_S,
                input=encode(Claim(NODE)).hex(), text=True, capture_output=True,
            )
        )  # fmt: skip
        assert done.stdout == ""
        assert "of user 12345 was turned away" in (directory / "keeper.log").read_text()
        assert first.poll() is None
