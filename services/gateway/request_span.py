"""The span of one API call: from its arrival to the last byte of its answer.

Names are those of OpenTelemetry's conventions for HTTP and for generative AI. A client's
traceparent is gone on with; whether the span is recorded is not the client's to say.
"""

from collections.abc import Iterable

from shared import telemetry
from shared.clock import wall_ns

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/classify": "classification",
}
"""What each route does with a model, in the words of the conventions as far as these have one."""
CLIENT_LEFT = 499
"""The status of an answer that nobody waited for."""


class RequestSpan:
    def __init__(self, parent: str, call: str) -> None:
        """`parent`: the client's traceparent, or "". `call`: the call's id."""
        self.own = telemetry.new_trace(parent)
        """Its traceparent, for what is done on its behalf."""
        self.exemplar = telemetry.exemplar(self.own)
        self.attributes: dict[str, telemetry.Attribute] = {"call": call}
        self.links: dict[str, None] = {}
        """The scaling events whose instances served it."""
        self.error = ""
        """The code of what ended it; empty: nothing did."""
        self._parent = parent
        self._start_ns = wall_ns()

    def link(self, traces: Iterable[str]) -> None:
        self.links.update(dict.fromkeys(traces))

    def end(self, method: str, route: str, status: int) -> None:
        attributes: dict[str, telemetry.Attribute] = {
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status,
            **self.attributes,
        }
        if operation := OPERATIONS.get(route):
            attributes["gen_ai.operation.name"] = operation
            attributes["gen_ai.provider.name"] = "lambdascale"
        if self.error or status >= 400:
            attributes["error.type"] = self.error or str(status)
        # What a client did wrong, or no longer wanted, is no error of the server.
        failed = status >= 500 or (status < 400 and self.error not in ("", "cancelled"))
        telemetry.record(
            "request",
            start_ns=self._start_ns,
            end_ns=wall_ns(),
            parent=self._parent,
            own=self.own,
            attributes=attributes,
            links=list(self.links),
            error=(self.error or str(status)) if failed else "",
        )
