"""A whole node whose engine computes from an arena of its own; here that is host memory, too."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from services.node import real_parts
from services.node.engine.budget import kv_budget
from services.node.engine.engine import TorchEngine
from services.node.memory.device import DeviceArena
from services.node.memory.views import Memory
from services.node.moving.data_plane import DataPlane
from shared import subjects, telemetry
from shared.config import TelemetryConfig
from shared.errors import CapacityExceeded
from shared.ids import NodeId
from shared.messages.pool import Tier
from tests.support.device_memory import HostDriver, Machine
from tests.support.links import SlowLink
from tests.unit.node.cluster import ALL, nodes
from tests.unit.node.service.test_handover import COUNT, MOVING, has_all, move, of, run


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine(shares=False)
    yield machine
    assert machine.opened == []


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> Iterator[list[SlowLink]]:
    """Nodes on `cuda` compute from an arena behind such a link, which is added here."""
    made: list[SlowLink] = []

    def on_cpu(
        memory: Memory, device: torch.device, *, beside: Sequence[Memory] = ()
    ) -> DeviceArena:
        assert device.type == "cuda"
        made.append(SlowLink())
        return DeviceArena(
            memory,
            torch.device("cpu"),
            made[-1],
            lambda ordinal: HostDriver(machine),
            beside=beside,
        )

    monkeypatch.setattr(real_parts, "torch_device", torch.device)
    monkeypatch.setattr(real_parts, "DeviceArena", on_cpu)
    monkeypatch.setattr(
        real_parts, "TorchEngine", lambda _, *rest, **more: TorchEngine("cpu", *rest, **more)
    )
    monkeypatch.setattr(
        real_parts, "kv_budget", lambda config, _: kv_budget(config, torch.device("cpu"))
    )
    yield made
    assert not any(link.locked for link in made)


async def test_a_model_comes_to_the_device_and_goes(
    tmp_path: Path, checkpoint: Path, links: list[SlowLink]
) -> None:
    telemetry.configure("node-b", TelemetryConfig(trace_dir=str(tmp_path)))
    try:
        async with nodes(tmp_path, checkpoint, "a") as up:
            await up.promoted("a")
            await up.start("b", device="cuda")
            assert up.info("a").staging == ""
            assert up.info("b").staging == "pinned host arena"
            with telemetry.span("scale_event"):
                plan = up.plan("b", dict.fromkeys(ALL, "a"), event="ev-2")
                plan = msgspec.structs.replace(plan, trace=telemetry.here())
                await up.request(subjects.node_plan(NodeId("b")), plan)
            await up.until_arrived("b", ALL)
            tokens = await up.generate("a", request="on a")
            assert await up.generate("b", request="on b") == tokens
            (link,) = links
            assert link.copies.done == list(up.record.block_bytes)

            await up.release("b", keep=Tier.HOST)
            await up.until_holds("b", {Tier.HOST: ALL})
            await up.apply("b", {}, event="ev-3")
            await up.until_holds("b", {Tier.GPU: ALL})
            assert await up.generate("b", request="awake") == tokens
            assert len(link.copies.done) == len(ALL)  # what it had on the device is still there
            await up.release("b")
            await up.nothing_leaked("b")

            await up.apply("b", dict.fromkeys(ALL, "a"), event="ev-4")
            await up.until_arrived("b", ALL, "ev-4")
            assert len(link.copies.done) == 2 * len(ALL)  # but not after it was given away
            assert await up.generate("b", request="again") == tokens
    finally:
        telemetry.shutdown()
    spans = read_spans(tmp_path / "node-b.jsonl")
    (event,) = (span["span_id"] for span in spans if span["name"] == "scale_event")
    (applied,) = (
        span["span_id"]
        for span in spans
        if span["name"] == "apply_plan" and span["parent_id"] == event
    )
    phases = sorted(span["name"] for span in spans if span["parent_id"] == applied)
    assert phases == ["open_model", "register_regions"] + ["upload"] * len(ALL)


async def test_blocks_go_from_device_to_device(
    tmp_path: Path, checkpoint: Path, links: list[SlowLink], machine: Machine
) -> None:
    """They are up when they have come, whoever sends them; a relay sends them on."""
    machine.shares = True
    async with nodes(tmp_path, checkpoint, "a", settings={"machine": "here"}) as up:
        for name in "bcd":
            await up.start(name, device="cuda", machine="here")
        assert up.info("b").staging == "CUDA IPC, else pinned host arena"
        await up.promoted("a")
        await up.apply("b", dict.fromkeys(ALL, "a"), event="ev-b")
        assert {a.transport for a in await up.until_arrived("b", ALL)} == {"shm"}
        await up.apply("d", dict.fromkeys(ALL, "c"), event="ev-cd")
        await up.apply("c", dict.fromkeys(ALL, "b"), event="ev-cd")
        for name in "cd":
            assert {a.transport for a in await up.until_arrived(name, ALL)} == {"cuda-ipc"}
        tokens = await up.generate("a", request="on a")
        for name in "bcd":
            assert await up.generate(name, request=f"on {name}") == tokens
        b, c, d = (link.copies.done for link in links)
        assert (sorted(b), c, d) == (sorted(up.record.block_bytes), [], [])


@pytest.mark.parametrize("direct", [True, False])
async def test_kv_goes_from_device_to_device(
    tmp_path: Path, checkpoint: Path, links: list[SlowLink], machine: Machine, direct: bool
) -> None:
    """And by the host's memory if the target's device does not reach the source's."""
    machine.shares = True
    async with nodes(tmp_path, checkpoint, "a", settings=MOVING | {"machine": "here"}) as up:
        for name in "bc":
            machine.peers = direct
            await up.start(name, **MOVING, device="cuda", machine="here")
        await has_all(up, "a", "b", "c")
        plane, b = up.services["c"]._data, up.services["b"]._data.address
        assert isinstance(plane, DataPlane)
        await plane.connect(b)
        assert plane._transport.way_to(b) == ("cuda-ipc" if direct else "shm")
        expected = await run(up, "oracle", "a")
        of_c, weights = machine.drivers[-1], len(machine.drivers[-1].copied)
        tokens = await move(up, ("b",), "c")
        found = {token.index: token.token for token in tokens}
        assert [found[index] for index in range(COUNT)] == expected
        (cached,) = (token.cached for token in of(up, 2) if token.cached)
        sent = up.services["b"]._worker.load().kv_sent_bytes
        assert up.services["c"]._worker.load().kv_received_bytes == sent > 0
        assert up.services["c"]._worker.load().received_tokens == cached
        kv = of_c.copied[weights:]
        assert {where for where, _ in kv} == ({"device"} if direct else set())
        assert sum(nbytes for _, nbytes in kv) == (sent if direct else 0)


async def test_direct_ways_to_the_device_can_be_left_out(
    tmp_path: Path, checkpoint: Path, links: list[SlowLink], machine: Machine
) -> None:
    machine.shares = True
    settings = {"machine": "here", "device": "cuda", "device_direct": False}
    async with nodes(tmp_path, checkpoint, "a", "b", settings=settings) as up:
        assert up.info("b").staging == "pinned host arena"
        await up.promoted("a")
        await up.apply("b", dict.fromkeys(ALL, "a"), event="ev-b")
        assert {a.transport for a in await up.until_arrived("b", ALL)} == {"shm"}


async def test_wrong_bytes_of_a_device_go_no_further(
    tmp_path: Path,
    checkpoint: Path,
    links: list[SlowLink],
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine.shares = True
    monkeypatch.setattr(HostDriver, "to_device", _spoilt)
    async with nodes(tmp_path, checkpoint, "a", settings={"machine": "here"}) as up:
        for name in "bc":
            await up.start(name, device="cuda", machine="here")
        await up.promoted("a")
        await up.apply("b", dict.fromkeys(ALL, "a"), event="ev-b")
        await up.until_arrived("b", ALL)
        await up.apply("c", {0: "b"}, event="ev-c")
        (failed,) = await up.until_failed("c")
        assert failed.code == "digest"
        await up.apply("c", {0: "a"}, event="ev-c", revision=1)
        await up.until_arrived("c", [0])
        # What came to the device is not taken for what came to the host after it.
        assert links[1].copies.done == [up.record.block_bytes[0]]


def _spoilt(driver: HostDriver, target: int, source: int, nbytes: int) -> None:
    """A copy of something else."""
    driver._begin("device", target, source + 1, nbytes)


async def test_a_device_without_room_ends_the_node(
    tmp_path: Path, checkpoint: Path, links: list[SlowLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    async with nodes(tmp_path, checkpoint, "a") as up:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", no_room)
            with pytest.raises(CapacityExceeded, match=r"out of memory.*node\.arena_bytes"):
                await up.start("b", device="cuda")
        await up.start("b", device="cuda")


def read_spans(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
