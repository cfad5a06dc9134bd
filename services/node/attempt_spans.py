"""The spans of the attempts that a node leads: from the submission to the first token, and from
there to the last. They belong to the request's trace, which its gateway began."""

from dataclasses import dataclass

import msgspec

from shared import telemetry
from shared.clock import wall_ns
from shared.ids import NodeId, RequestId
from shared.messages.serving import Cancel, Submit, Tokens

Key = tuple[RequestId, int]


@dataclass(slots=True)
class _Open:
    submit: Submit
    own: str
    """The traceparent of its span."""
    begun_ns: int
    first_ns: int = 0
    """When its first token came; 0: not yet."""
    tokens: int = 0
    cached: int = 0


class AttemptSpans:
    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._open: dict[Key, _Open] = {}
        """Attempts of requests that have a trace."""

    def begun(self, submit: Submit) -> Submit:
        """The attempt as it goes on from here: its trace is the span of the attempt, in which its
        other stages record theirs. The same attempt may be submitted again, to ask whether it goes
        on."""
        if not submit.trace:
            return submit
        key = (submit.request, submit.attempt)
        if (known := self._open.get(key)) is None:
            known = self._open[key] = _Open(submit, telemetry.new_trace(submit.trace), wall_ns())
        return msgspec.structs.replace(submit, trace=known.own)

    def told(self, tokens: Tokens) -> None:
        if not self._open:
            return
        for token in tokens.tokens:
            attempt = self._open.get((token.request, token.attempt))
            if attempt is None:
                continue
            attempt.tokens += 1
            if not attempt.first_ns:
                attempt.first_ns, attempt.cached = wall_ns(), token.cached
            if token.finish:
                self._end((token.request, token.attempt), token.finish)
        for failed in tokens.failed:
            self._end((failed.request, failed.attempt), failed.code, failed.message)

    def cancelled(self, cancel: Cancel) -> None:
        self._end((cancel.request, cancel.attempt), "cancelled")

    def refused(self, submit: Submit, error: BaseException) -> None:
        self._end((submit.request, submit.attempt), "refused", repr(error))

    def _end(self, key: Key, end: str, error: str = "") -> None:
        attempt = self._open.pop(key, None)
        if attempt is None:
            return
        submit, now_ns = attempt.submit, wall_ns()
        own = telemetry.record(
            "attempt",
            start_ns=attempt.begun_ns,
            end_ns=now_ns,
            parent=submit.trace,
            own=attempt.own,
            attributes={
                "node": self._node,
                "request": submit.request,
                "attempt": submit.attempt,
                "instance": submit.instance,
                "stages": " ".join(f"{s.node}[{s.start}:{s.stop}]" for s in submit.stages),
                "tokens_before": len(submit.tokens),
                "tokens": attempt.tokens,
                "cached_tokens": attempt.cached,
                "end": end,
            },
            error=error,
        )
        first_ns = attempt.first_ns
        if first_ns:
            telemetry.record("prefill", start_ns=attempt.begun_ns, end_ns=first_ns, parent=own)
            telemetry.record("decode", start_ns=first_ns, end_ns=now_ns, parent=own)
