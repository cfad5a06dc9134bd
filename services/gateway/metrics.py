"""The gateway's Prometheus metrics, in a registry of their own."""

from collections.abc import Iterable, Mapping
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from services.gateway.core.breaker import State
from shared.ids import ModelName
from shared.messages.load import ModelLoad

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "lambdascale_gateway"
_WAITS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{_PREFIX}_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{_PREFIX}_{name}", text, ["model"], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"{_PREFIX}_{name}", text, ["model"], buckets=buckets, registry=self.registry
            )

        self.connections = Gauge(
            f"{_PREFIX}_connections", "Open connections", registry=self.registry
        )
        self.refused_connections = counter("refused_connections", "For want of room")
        self.responses = counter("responses", "HTTP answers of the API", "route", "status")
        self.requests = counter("requests", "Completions, by how they ended", "model", "end")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of accepted prompts", "model")
        self.cached_tokens = counter(
            "cached_prompt_tokens", "Of these, found in a node's prefix cache", "model"
        )
        self.tokens = counter("generated_tokens", "Tokens taken from instances", "model")
        self.usage_lost = counter("lost_usage_records", "Calls whose use was not written down")
        self.resumptions = counter("resumptions", "Attempts that were ended", "model", "reason")
        self.switched = counter(
            "switched_requests",
            "Requests whose path ended, by what came of them",
            "model",
            "choice",
        )
        self.checks = counter("checks", "Checks of replicas, by verdict", "model", "verdict")
        self.opened = counter(
            "breaker_opened", "Times that an instance was left alone", "model", "reason"
        )
        self.instances = Gauge(
            f"{_PREFIX}_instances",
            "Instances, by the state of their breakers",
            ["model", "state"],
            registry=self.registry,
        )
        self.ttft = histogram("ttft_seconds", "Arrival to first token", _WAITS)
        self.tpot = histogram("tpot_seconds", "Mean time of a token after the first", _STEPS)
        self.queued = gauge("queued_requests", "Requests that wait for an instance")
        self.running = gauge("running_requests", "Requests on instances")
        self.outstanding = gauge("outstanding_tokens", "Tokens to prefill and to generate")

    def set_loads(self, loads: Iterable[ModelLoad]) -> None:
        for load in loads:
            self.queued.labels(load.model).set(load.queued_requests)
            self.running.labels(load.model).set(load.running_requests)
            self.outstanding.labels(load.model).set(load.queued_tokens + load.running_tokens)

    def set_breakers(self, breakers: Mapping[ModelName, Mapping[State, int]]) -> None:
        for model, states in breakers.items():
            for state in State:
                self.instances.labels(model, state.value).set(states.get(state, 0))

    def forget(self, model: str) -> None:
        """Removes the model's gauges. Its counters stay."""
        for gauge in (self.queued, self.running, self.outstanding):
            with suppress(KeyError):  # no load was set yet
                gauge.remove(model)
        for state in State:
            with suppress(KeyError):
                self.instances.remove(model, state.value)

    def render(self) -> bytes:
        return generate_latest(self.registry)
