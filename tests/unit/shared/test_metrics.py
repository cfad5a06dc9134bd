"""The families of a process, as Prometheus reads them."""

import math

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families

from shared.metrics import Metrics, Series

OPEN = "application/openmetrics-text; version=1.0.0"


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    body, _ = metrics.render()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families(body.decode())
        for sample in family.samples
    }


def test_watched_values_are_those_of_the_moment() -> None:
    metrics, there = Metrics(), {"a": 1, "b": 2}

    def read() -> Series:
        return [((model,), value) for model, value in there.items()]

    metrics.watch("gauge", "held", "text", "model", read=read)
    assert samples(metrics) == {("held", "a"): 1, ("held", "b"): 2}
    del there["a"]
    assert samples(metrics) == {("held", "b"): 2}


def test_a_family_that_cannot_be_read_leaves_the_others_be() -> None:
    def broken() -> Series:
        yield ("a",), 1
        raise ValueError

    metrics = Metrics()
    metrics.watch("counter", "broken_total", "text", "model", read=broken)
    metrics.watch("counter", "whole_total", "text", read=lambda: [((), 3)])
    assert samples(metrics)["whole_total",] == 3


def test_what_is_gone_is_forgotten() -> None:
    metrics = Metrics()
    counter = metrics.counter("asked_total", "text", "model", "end")
    times = metrics.histogram("took_seconds", "text", "model", buckets=(1,))
    for model in ("a", "b"):
        counter.labels(model, "stop").inc()
        times.labels(model).observe(0.5)
    metrics.forget(model="a")
    assert {name for name in samples(metrics) if "a" in name} == set()
    metrics.forget(other="b")
    assert samples(metrics)["asked_total", "stop", "b"] == 1


def test_an_alias_is_the_same_under_another_name() -> None:
    metrics = Metrics()
    times = metrics.histogram("ours_seconds", "text", "model", buckets=(1,))
    metrics.counter("ours_total", "text", "model").labels("m").inc(4)
    metrics.alias("vllm:theirs_seconds", "ours_seconds", {"model": "model_name"})
    metrics.alias("vllm:theirs_total", "ours_total", {"model": "model_name"})
    times.labels("m").observe(0.5, {"trace_id": "ab"})
    found = {}
    body, content_type = metrics.render(OPEN)
    assert content_type.startswith("application/openmetrics-text")
    for family in open_families(body.decode()):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            found[sample.name, *sorted(sample.labels.items())] = sample
    theirs = found["vllm:theirs_seconds_bucket", ("le", "1.0"), ("model_name", "m")]
    ours = found["ours_seconds_bucket", ("le", "1.0"), ("model", "m")]
    assert theirs.value == ours.value == 1
    assert theirs.exemplar == ours.exemplar
    assert theirs.exemplar is not None
    assert theirs.exemplar.labels == {"trace_id": "ab"}
    assert found["vllm:theirs_total", ("model_name", "m")].value == 4


def test_prometheus_form_has_no_exemplars_and_no_times_of_creation() -> None:
    metrics = Metrics()
    metrics.histogram("took_seconds", "text", buckets=(1,)).observe(0.5, {"trace_id": "ab"})
    body, content_type = metrics.render("*/*")
    assert content_type.startswith("text/plain")
    assert b"trace_id" not in body
    assert b"_created" not in body
    assert samples(metrics)["took_seconds_bucket", "1.0"] == 1


def test_the_process_is_described_by_what_it_shows() -> None:
    metrics = Metrics()
    metrics.include_process()
    assert {name for name, *_ in samples(metrics)} == {family.name for family in metrics.families}
    assert math.isfinite(samples(metrics)["process_resident_memory_bytes",])


def test_a_name_stands_for_one_family() -> None:
    metrics = Metrics()
    metrics.counter("a_total", "text")
    with pytest.raises(AssertionError, match="there twice"):
        metrics.counter("a_total", "text")
