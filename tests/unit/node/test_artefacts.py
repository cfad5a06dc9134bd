"""Libraries from other nodes: which are taken, and which are not."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from services.node import compiling
from services.node.artefacts import Artefacts
from shared import subjects
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages.compiled import Compiled, FetchCompiled

SOURCE = "int answer(void) { return 42; }"
FLAGS = ("-shared", "-fPIC")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    return path


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBus(MemoryBroker(), "node") as bus:
        yield bus


def spawn(work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
    return asyncio.create_task(work, name=name)


def answer(source: Path) -> int:
    return int(compiling.library("answer", [source], [], FLAGS).answer())


def built(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bytes:
    """The library as another node has it, which is then gone from here."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
        assert answer(source) == 42
    (made,) = (tmp_path / "other" / "lambdascale").glob("*.so")
    return made.read_bytes()


async def give(bus: MemoryBus, source: Path, data: bytes, digest: str) -> None:
    """Another node that gives this data for the library of the source."""
    name = compiling.place("answer", [source], [], FLAGS).name

    async def reply(_: FetchCompiled) -> Compiled:
        return Compiled(name=name, data=data, digest=digest)

    await bus.serve(subjects.compiled(name), FetchCompiled, reply)


async def test_a_library_that_another_node_has_is_not_compiled(
    bus: MemoryBus, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = built(source, monkeypatch, tmp_path)
    await give(bus, source, data, sha256(data).hexdigest())
    monkeypatch.setenv("PATH", str(tmp_path))
    async with Artefacts(bus, spawn):
        assert await asyncio.to_thread(answer, source) == 42
    with pytest.raises(compiling.CompileFailed, match="no C compiler"):
        compiling.library("other", [source], [], FLAGS)


async def test_what_does_not_load_is_compiled_here(bus: MemoryBus, source: Path) -> None:
    data = b"no library"
    await give(bus, source, data, sha256(data).hexdigest())
    async with Artefacts(bus, spawn):
        assert await asyncio.to_thread(answer, source) == 42


async def test_what_has_another_digest_is_not_loaded(
    bus: MemoryBus, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "wrong.c"
    wrong.write_text(SOURCE.replace("42", "41"))
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
        assert answer(wrong) == 41
        data = compiling.place("answer", [wrong], [], FLAGS).read_bytes()
    await give(bus, source, data, "0" * 64)
    async with Artefacts(bus, spawn):
        assert await asyncio.to_thread(answer, source) == 42


async def test_what_was_loaded_is_given_to_others(bus: MemoryBus, source: Path) -> None:
    offered: list[asyncio.Task[None]] = []

    def note(work: Coroutine[Any, Any, None], name: str) -> None:
        offered.append(spawn(work, name))

    async with Artefacts(bus, note) as artefacts:
        assert await asyncio.to_thread(answer, source) == 42
        await asyncio.sleep(0)
        await asyncio.gather(*offered)
        path = compiling.place("answer", [source], [], FLAGS)
        assert await asyncio.to_thread(artefacts.fetch, path.name) == path.read_bytes()
