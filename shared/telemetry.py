"""Logs and traces, the same way in every process.

Logs go to standard error through structlog. Traces are OpenTelemetry spans. Threads write them to a
JSON-lines file (`shared.span_file`) and, if an endpoint is configured, send them by OTLP. Parents
travel as W3C traceparent strings in messages (`Message.trace`), so a scaling event is one trace
across all processes. There is no span for single tokens.
"""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.config import TelemetryConfig
from shared.errors import ConfigError
from shared.span_file import SpanFile

Attribute = str | int | float | bool
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL,
}
_propagator = TraceContextTextMapPropagator()
_ids = RandomIdGenerator()
_provider: TracerProvider | None = None
_processors: tuple[SpanProcessor, ...] = ()
"""What takes the spans that have ended; empty: spans are not exported."""
_tracer: trace.Tracer = trace.NoOpTracer()
"""The provider's tracer, kept because making one takes a while."""
_SCOPE = InstrumentationScope("lambdascale")
_SAMPLED, _UNSET = TraceFlags(TraceFlags.SAMPLED), Status(StatusCode.UNSET)


class _Lines(structlog.PrintLogger):
    """Lines that cannot be written, because their disk is full for example, are left out: whoever
    logs goes on."""

    def msg(self, message: str) -> None:
        with suppress(OSError):
            super().msg(message)

    debug = info = warning = error = critical = exception = log = msg


def configure(service: str, config: TelemetryConfig) -> None:
    """Sets up logs and traces of this process when it starts. ConfigError for a bad setting."""
    global _provider, _tracer, _processors
    shutdown()
    if config.log_level not in _LEVELS:
        raise ConfigError(f"telemetry.log_level {config.log_level!r}: use {', '.join(_LEVELS)}")
    renderer = (
        structlog.processors.JSONRenderer()
        if config.log_json
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        )
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[config.log_level]),
        logger_factory=lambda *_: _Lines(sys.stderr),
        cache_logger_on_first_use=False,
    )
    resource = Resource.create({"service.name": service})
    # Whoever calls from outside may go on with a trace, and cannot keep ours from being recorded.
    provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, id_generator=_ids)
    processors: list[SpanProcessor] = []
    if config.trace_dir:
        directory = Path(config.trace_dir)
        directory.mkdir(parents=True, exist_ok=True)
        processors.append(SpanFile(directory / f"{service}.jsonl"))
    if config.otlp_endpoint:
        # A tenth of a second to import, which no other process has to spend.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=f"{config.otlp_endpoint.rstrip('/')}/v1/traces")
        processors.append(BatchSpanProcessor(exporter))
    for processor in processors:
        provider.add_span_processor(processor)
    _provider, _processors = provider, tuple(processors)
    _tracer = provider.get_tracer(_SCOPE.name)


def shutdown() -> None:
    """Writes and sends what has ended, and closes. Exiting does so too, if nobody did before."""
    global _provider, _tracer, _processors
    if _provider is not None:
        _provider.shutdown()
        _provider, _tracer, _processors = None, trace.NoOpTracer(), ()


def logger(role: str, **context: Attribute) -> structlog.stdlib.BoundLogger:
    """A logger that obeys the configuration at the time of each call, even if it is made before
    `configure`."""
    lazy: structlog.stdlib.BoundLogger = structlog.get_logger(role=role, **context)
    return lazy


def context_of(traceparent: str) -> SpanContext | None:
    """The span that a traceparent names. None if it is empty or malformed."""
    if not traceparent:
        return None
    found = trace.get_current_span(
        _propagator.extract({"traceparent": traceparent})
    ).get_span_context()
    return found if found.is_valid else None


def traceparent(span: Span) -> str:
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", "")


def new_trace(parent: str = "") -> str:
    """The traceparent of a span that is recorded later (`own` of `record`): in its parent's trace,
    or the root of a new one. Empty: no traces are kept."""
    if _provider is None:
        return ""
    above = context_of(parent)
    trace_id = above.trace_id if above else _ids.generate_trace_id()
    return f"00-{trace_id:032x}-{_ids.generate_span_id():016x}-01"


def exemplar(traceparent: str) -> dict[str, str] | None:
    """What ties a measurement to a trace. None: no traces are exported."""
    return {"trace_id": traceparent.split("-")[1]} if traceparent and _processors else None


def here() -> str:
    """The traceparent of the innermost `span` around this code, which tasks begun inside it
    inherit. Empty if there is none."""
    return traceparent(trace.get_current_span())


def start(
    name: str,
    *,
    parent: str = "",
    start_ns: int | None = None,
    attributes: Mapping[str, Attribute] | None = None,
    links: Sequence[str] = (),
) -> Span:
    """Begins a span. The caller ends it (`span.end(end_time=ns)`). Where spans are not exported, it
    stands for its parent."""
    if _provider is not None and not _processors:
        return NonRecordingSpan(context_of(parent) or INVALID_SPAN_CONTEXT)
    return _tracer.start_span(
        name,
        context=_propagator.extract({"traceparent": parent}),
        start_time=start_ns,
        attributes=dict(attributes or {}),
        links=_links(links),
    )


def record(
    name: str,
    *,
    start_ns: int,
    end_ns: int,
    parent: str = "",
    own: str = "",
    attributes: Mapping[str, Attribute] | None = None,
    links: Sequence[str] = (),
    error: str = "",
) -> str:
    """Records a span that is already over. Returns its traceparent, or its parent's if spans are
    not exported.

    `own`: the traceparent of `new_trace` that it is known by already. `error`: what it failed with.
    """
    if _provider is None or not _processors:
        return parent
    own = own or new_trace(parent)
    _, trace_id, span_id, _ = own.split("-")
    # A tracer begins a span, locks it, and ends it, which takes four times as long; a request has
    # five spans.
    over = ReadableSpan(
        name,
        context=SpanContext(int(trace_id, 16), int(span_id, 16), False, _SAMPLED),
        parent=context_of(parent),
        resource=_provider.resource,
        attributes=dict(attributes or {}),
        links=_links(links),
        status=Status(StatusCode.ERROR, error) if error else _UNSET,
        start_time=start_ns,
        end_time=end_ns,
        instrumentation_scope=_SCOPE,
    )
    for processor in _processors:
        processor.on_end(over)
    return own


def _links(traceparents: Iterable[str]) -> list[Link]:
    return [Link(context) for each in traceparents if (context := context_of(each))]


@contextmanager
def span(
    name: str, *, parent: str = "", attributes: Mapping[str, Attribute] | None = None
) -> Iterator[Span]:
    """A span around a block of code. An exception marks the span and is raised on."""
    current = start(name, parent=parent, attributes=attributes)
    try:
        with trace.use_span(current, record_exception=False, set_status_on_exception=False):
            yield current
    except BaseException as error:
        current.set_status(Status(StatusCode.ERROR, repr(error)))
        raise
    finally:
        current.end()
