"""What the gateway records of scaling: first tokens and mode switches."""

import asyncio

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared import telemetry
from shared.messages.instances import InstanceState
from tests.support import spans as support_spans
from tests.unit.gateway.reader import TEXT, Reader, nodes_of
from tests.unit.gateway.support import NAME, Cluster, path, replica, running

MOVING = InstanceState.MOVING


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    return support_spans.exported(monkeypatch)


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


async def test_the_first_token_of_a_path_is_reported_once(spans: InMemorySpanExporter) -> None:
    async with running(path(1, 2)) as cluster:
        await nodes_of(cluster, 1, pause_at=None)
        assert await Reader(cluster).read() == TEXT
        assert await Reader(cluster).read() == TEXT
        await cluster.until(lambda: bool(cluster.arrivals))
        (arrival,) = cluster.arrivals
        assert (arrival.event, arrival.instance, arrival.stages) == ("event-1", "path-1-2", 2)
        (span,) = named(spans, "first_token")
        assert span.attributes
        assert span.attributes["instance"] == "path-1-2"


async def test_a_request_is_a_span_linked_to_the_event_that_served_it(
    spans: InMemorySpanExporter,
) -> None:
    async with running(path(1, 2)) as cluster:
        await nodes_of(cluster, 1, pause_at=None)
        event = telemetry.start("scale_event")
        await cluster.publish(path(1, 3), trace=telemetry.traceparent(event))
        await Reader(cluster).read()
        await cluster.until(lambda: bool(named(spans, "request")))
        (span,) = named(spans, "request")
        assert span.attributes
        assert (
            span.attributes["gen_ai.usage.output_tokens"] == len(TEXT) + 1
        )  # and the one that ends it
        assert span.attributes["attempts"] == 1
        assert [link.context.span_id for link in span.links] == [event.get_span_context().span_id]


async def test_a_mode_switch_is_one_span(spans: InMemorySpanExporter) -> None:
    async with running(path(1, 2)) as cluster, asyncio.TaskGroup() as group:
        _, second, third = await nodes_of(cluster, 1, 2, 3, pause_at=10)
        readers = [Reader(cluster) for _ in range(3)]
        reading = [group.create_task(reader.read()) for reader in readers]
        for reader in readers:
            await reader.until(10)
        await cluster.publish(path(1, 2, state=MOVING), replica(2), replica(3))
        await second.until(lambda: bool(second.submits))
        await third.until(lambda: bool(third.submits))
        assert not named(spans, "mode_switch")
        for node in (second, third):
            node.pause_at = 20
            node.resume.set()
        for reader in readers:
            await reader.until(11)
        (span,) = named(spans, "mode_switch")
        assert span.attributes == {
            "model": NAME,
            "moved": 3,
            "stayed": 0,
            "waiting": 0,
            "from_instances": "path-1-2",
        }
        assert [await task for task in reading] == [TEXT] * 3


async def test_a_mode_switch_tells_both_costs(spans: InMemorySpanExporter) -> None:
    """Passes that take no time to speak of: all move. Passes of 10 s: what is left stays."""
    async with running(path(1, 2)) as cluster, asyncio.TaskGroup() as group:
        first, second = await nodes_of(cluster, 1, 2, pause_at=10)
        reading = group.create_task((reader := Reader(cluster)).read())
        await reader.until(10)
        await cluster.publish(path(1, 2, state=MOVING), replica(2), step_s=10.0)
        await cluster.until(lambda: bool(named(spans, "mode_switch")))
        (stayed,) = named(spans, "mode_switch")
        assert stayed.attributes
        assert (stayed.attributes["moved"], stayed.attributes["stayed"]) == (0, 1)
        assert stayed.attributes["stayed_stay_s"] < stayed.attributes["stayed_move_s"]  # type: ignore[operator]
        assert "moved_stay_s" not in stayed.attributes
        second.pause_at = None
        await cluster.publish(path(1, 2, state=MOVING), replica(2), step_s=1e-9)
        assert await reading == TEXT
        assert not first.resume.is_set()
        (_, moved) = named(spans, "mode_switch")
        assert moved.attributes
        assert (moved.attributes["moved"], moved.attributes["stayed"]) == (1, 0)
        assert moved.attributes["moved_stay_s"] > moved.attributes["moved_move_s"]  # type: ignore[operator]
        assert switched(cluster) == {"moved": 1.0, "stayed": 1.0}


def switched(cluster: Cluster) -> dict[str, float]:
    registry = cluster.service._metrics.families.registry
    name = "lambdascale_gateway_switched_requests_total"
    labels = ({"model": NAME, "choice": choice} for choice in ("moved", "stayed"))
    return {each["choice"]: registry.get_sample_value(name, each) or 0.0 for each in labels}
