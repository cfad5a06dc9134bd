"""The gateway's Prometheus metrics.

Times of requests have the names of OpenTelemetry's conventions for generative AI. What tools for
vLLM look for is shown under vLLM's names too.
"""

from collections.abc import Callable, Iterable, Mapping

from services.gateway.core.breaker import State
from shared.ids import ModelName
from shared.messages.load import ModelLoad
from shared.metrics import Metrics as Families
from shared.metrics import Series

_P = "lambdascale_gateway"
_GENERATIVE = "gen_ai_server"
_MODEL = "gen_ai_request_model"
_WAITS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_WHOLE = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
_ALIASES = {
    "time_to_first_token_seconds": f"{_GENERATIVE}_time_to_first_token_seconds",
    "time_per_output_token_seconds": f"{_GENERATIVE}_time_per_output_token_seconds",
    "e2e_request_latency_seconds": f"{_GENERATIVE}_request_duration_seconds",
    "request_queue_time_seconds": f"{_P}_queue_seconds",
    "num_requests_running": f"{_P}_running_requests",
    "num_requests_waiting": f"{_P}_queued_requests",
    "prompt_tokens_total": f"{_P}_prompt_tokens_total",
    "generation_tokens_total": f"{_P}_generated_tokens_total",
    "prefix_cache_queries_total": f"{_P}_prompt_tokens_total",
    "prefix_cache_hits_total": f"{_P}_cached_prompt_tokens_total",
    "request_success_total": f"{_P}_requests_total",
}
"""vLLM's names, without `vllm:`."""
_THEIR_LABELS = {_MODEL: "model_name", "model": "model_name", "end": "finished_reason"}


class Metrics:
    def __init__(
        self,
        loads: Callable[[], Iterable[ModelLoad]] = tuple,
        breakers: Callable[[], Mapping[ModelName, Mapping[State, int]]] = dict,
    ) -> None:
        """`loads` and `breakers`: of all models, as they are."""
        self.families = families = Families()
        self.connections: Callable[[], int] = lambda: 0
        """The number of open connections."""
        counter, histogram = families.counter, families.histogram
        families.watch(
            "gauge", f"{_P}_connections", "Open connections",
            read=lambda: [((), self.connections())],
        )  # fmt: skip
        self.refused_connections = counter(
            f"{_P}_refused_connections_total", "Connections refused for want of room"
        )
        self.responses = counter(
            f"{_P}_responses_total", "HTTP answers of the API", "route", "status"
        )
        self.requests = counter(
            f"{_P}_requests_total", "Completions, by how they ended", "model", "end"
        )
        self.prompt_tokens = counter(
            f"{_P}_prompt_tokens_total", "Tokens of accepted prompts", "model"
        )
        self.cached_tokens = counter(
            f"{_P}_cached_prompt_tokens_total", "Of these, found in a node's prefix cache", "model"
        )
        self.tokens = counter(
            f"{_P}_generated_tokens_total", "Tokens taken from instances", "model"
        )
        self.usage_lost = counter(
            f"{_P}_lost_usage_records_total", "Calls whose use was not written down"
        )
        self.resumptions = counter(
            f"{_P}_resumptions_total", "Attempts that were ended, to go on elsewhere",
            "model", "reason",
        )  # fmt: skip
        self.switched = counter(
            f"{_P}_switched_requests_total",
            "Requests whose path ended, by what came of them", "model", "choice",
        )  # fmt: skip
        self.checks = counter(
            f"{_P}_checks_total", "Checks of replicas, by verdict", "model", "verdict"
        )
        self.opened = counter(
            f"{_P}_breaker_opened_total", "Times that an instance was left alone",
            "model", "reason",
        )  # fmt: skip
        families.watch(
            "gauge", f"{_P}_instances", "Instances, by the state of their breakers",
            "model", "state", read=lambda: _instances(breakers()),
        )  # fmt: skip
        self.ttft = histogram(
            f"{_GENERATIVE}_time_to_first_token_seconds", "From arrival to the first token",
            _MODEL, buckets=_WAITS,
        )  # fmt: skip
        self.tpot = histogram(
            f"{_GENERATIVE}_time_per_output_token_seconds",
            "Mean time of a request's tokens after the first", _MODEL, buckets=_STEPS,
        )  # fmt: skip
        self.duration = histogram(
            f"{_GENERATIVE}_request_duration_seconds",
            "From a request's arrival to the end of its answer, of requests that ended well",
            _MODEL, buckets=_WHOLE,
        )  # fmt: skip
        self.queue_s = histogram(
            f"{_P}_queue_seconds",
            "From arrival until a request was handed to the instance that gave its first token",
            "model", buckets=_WAITS,
        )  # fmt: skip

        def gauge(name: str, text: str, value: Callable[[ModelLoad], float]) -> None:
            def read() -> Series:
                return [((load.model,), value(load)) for load in loads()]

            families.watch("gauge", f"{_P}_{name}", text, "model", read=read)

        gauge(
            "queued_requests",
            "Requests that wait for an instance",
            lambda load: load.queued_requests,
        )
        gauge("running_requests", "Requests on instances", lambda load: load.running_requests)
        gauge(
            "outstanding_tokens",
            "Tokens to prefill and to generate",
            lambda load: load.queued_tokens + load.running_tokens,
        )
        for theirs, ours in _ALIASES.items():
            families.alias(f"vllm:{theirs}", ours, _THEIR_LABELS)
        self._of: dict[str, ModelSeries] = {}

    def of(self, model: str) -> "ModelSeries":
        """The series of a model's requests."""
        if (series := self._of.get(model)) is None:
            series = self._of[model] = ModelSeries(self, model)
        return series

    def forget(self, model: str) -> None:
        """Removes the series of a model that is gone."""
        self._of.pop(model, None)
        self.families.forget(model=model)
        self.families.forget(**{_MODEL: model})


class ModelSeries:
    """The series of one model's requests, looked up once: each look takes a lock."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)
        self.tokens = metrics.tokens.labels(model)
        self.ttft = metrics.ttft.labels(model)
        self.tpot = metrics.tpot.labels(model)
        self.duration = metrics.duration.labels(model)
        self.queue_s = metrics.queue_s.labels(model)


def _instances(breakers: Mapping[ModelName, Mapping[State, int]]) -> Series:
    for model, states in breakers.items():
        for state in State:
            yield (model, state.value), states.get(state, 0)
