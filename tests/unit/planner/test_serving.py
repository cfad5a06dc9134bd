"""What serves while a model loads, as configured; an event's spans make one tree."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from services.planner.core.paths import WeightedPath
from services.planner.core.serving.loading import Loading, ServingStrategy
from services.planner.core.serving.stop_the_world import stop_the_world
from services.planner.core.serving.strategies import SERVING
from shared import telemetry
from shared.config import TelemetryConfig
from shared.errors import ConfigError
from shared.messages.pool import ModelProfile, Profile
from shared.messages.scaling import EventState
from tests.unit.planner.cluster import CONFIG, Cluster
from tests.unit.planner.scripted import SLOTS

pytestmark = pytest.mark.virtual_time


async def test_the_configured_strategy_decides_what_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Loading] = []

    def spy(loading: Loading) -> tuple[WeightedPath, ...]:
        asked.append(loading)
        return stop_the_world(loading)

    monkeypatch.setitem(cast(dict[str, ServingStrategy], SERVING), "none", spy)
    async with Cluster(msgspec.structs.replace(CONFIG, serving="none")) as cluster:
        await cluster.serve(nodes=2)
        cluster.world.open_to(2)
        await cluster.scale(2)
        await cluster.until(
            lambda: any(len(loading.held) == 2 and loading.held[1] for loading in asked)
        )
        assert asked[-1].sources == {0}
        cluster.world.open_to(1000)
        await cluster.until_replicas("n0", "n1")
        assert all(instance.is_replica for known in cluster.sets for instance in known.instances)


async def test_an_unknown_way_of_serving_is_refused() -> None:
    async with Cluster(msgspec.structs.replace(CONFIG, serving="best")) as cluster:
        with pytest.raises(ConfigError, match=r"planner\.serving 'best': known are .*pipelines"):
            await cluster.start_planner()


async def test_instance_sets_say_what_nodes_measured(cluster: Cluster) -> None:
    (node,) = await cluster.serve(nodes=1)
    assert (cluster.sets[-1].decode_s, cluster.sets[-1].prefill_s_per_token) == (0.0, 0.0)
    model = cluster.sets[-1].model_id
    ran = ModelProfile(model_id=model, decode_s=0.02, prefill_s_per_token=0.001)
    node.profile = Profile(models=(ran,))
    await node.report()
    await cluster.until(lambda: cluster.sets[-1].decode_s == 0.02)
    assert cluster.sets[-1].prefill_s_per_token == 0.001


@pytest.fixture
def spans(tmp_path: Path) -> Iterator[Path]:
    telemetry.configure("planner", TelemetryConfig(trace_dir=str(tmp_path), log_level="warning"))
    yield tmp_path / "planner.jsonl"
    telemetry.shutdown()


def read(spans: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in spans.read_text().splitlines()]


async def test_the_spans_of_an_event_hang_under_one_root(cluster: Cluster, spans: Path) -> None:
    nodes = await cluster.serve(nodes=3)
    cluster.world.open_to(1)
    gateway = await cluster.add_gateway()
    await gateway.offer(3 * SLOTS)
    await cluster.until(lambda: cluster.paths)
    plan = nodes[1].plans[-1]
    await nodes[1].fail(plan, plan.pulls[-1].block, plan.pulls[-1].source)
    await cluster.until(lambda: nodes[1].plans[-1].revision == 1)
    cluster.world.open_to(1000)
    done = await cluster.until_event(EventState.COMPLETE)
    gateway.end_all()
    await cluster.until_replica_count(1)
    await cluster.until(lambda: sum(bool(node.releases) for node in nodes) == 2)
    await cluster.stop_planner()
    telemetry.shutdown()
    trace = done.trace.split("-")[1]
    of_event = [span for span in read(spans) if span["trace_id"] == trace]
    (root,) = [span for span in of_event if span["parent_id"] is None]
    assert root["name"] == "scale_event"
    assert root["attributes"]["state"] == "complete"
    assert root["attributes"]["event"] == done.id
    assert {"predicted.all_complete_s", "actual.all_complete_s"} <= root["attributes"].keys()
    others = [span for span in of_event if span is not root]
    (planned,) = [span for span in others if span["name"] == "plan"]
    under = {(span["parent_id"], span["name"]) for span in others}
    assert {name for parent, name in under if parent == planned["span_id"]} == {"reserve", "choose"}
    assert {name for parent, name in under if parent == root["span_id"]} == {
        "detect", "decide", "plan", "replan", "path_formed", "drain",
    }  # fmt: skip
    assert {parent for parent, _ in under} == {root["span_id"], planned["span_id"]}
    assert plan.trace == done.trace
    drained = {s["attributes"]["node"] for s in others if s["name"] == "drain"}
    assert drained <= {"n1", "n2"}, "n0 was brought up by another event"
