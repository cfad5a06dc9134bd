"""A whole node whose engine computes from an arena of its own; here that is host memory, too."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from services.node import parts
from services.node.engine.engine import TorchEngine
from services.node.memory.device import DeviceArena
from services.node.memory.views import Memory
from shared import subjects, telemetry
from shared.config import TelemetryConfig
from shared.ids import NodeId
from shared.messages.pool import Tier
from tests.support.links import SlowLink
from tests.unit.node.cluster import ALL, nodes


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[SlowLink]:
    """Nodes on `cuda` compute from an arena behind such a link, which is added here."""
    made: list[SlowLink] = []

    def on_cpu(memory: Memory, device: torch.device) -> DeviceArena:
        assert device.type == "cuda"
        made.append(SlowLink())
        return DeviceArena(memory, torch.device("cpu"), made[-1])

    monkeypatch.setattr(parts, "torch_device", torch.device)
    monkeypatch.setattr(parts, "DeviceArena", on_cpu)
    monkeypatch.setattr(
        parts, "TorchEngine", lambda _, *rest, **more: TorchEngine("cpu", *rest, **more)
    )
    return made


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
            assert await up.generate("b", request="awake") == tokens
            assert len(link.copies.done) == 2 * len(ALL)
            await up.release("b")
            await up.nothing_leaked("b")
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


def read_spans(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
