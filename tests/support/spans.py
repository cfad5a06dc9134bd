"""The spans that a test's code records, in memory."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from shared import telemetry


def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where this process's spans go, until the end of the test."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ALWAYS_ON)  # as `telemetry.configure` makes it
    processor = SimpleSpanProcessor(exporter)
    provider.add_span_processor(processor)
    monkeypatch.setattr(telemetry, "_provider", provider)
    monkeypatch.setattr(telemetry, "_processors", (processor,))
    monkeypatch.setattr(telemetry, "_tracer", provider.get_tracer("lambdascale"))
    return exporter
