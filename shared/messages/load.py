"""Load reports of gateways on core NATS, by which the planner decides: up to ten a second, and at
once when requests begin to wait.

Twice a second a report is *whole*: it names every model that has any load. The other reports name
the models whose load has changed. A model's entry is always complete. So the next whole report
makes up for a lost report, and a report that comes late or twice does no harm.
"""

import msgspec

from shared.ids import GatewayId, InstanceId, ModelName, NodeId
from shared.messages.base import Message

WHOLE_S = 0.5
"""Seconds between a gateway's whole reports."""


class ModelLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The load of one model at one gateway, now. Tokens count if they are still to prefill or to
    generate."""

    model: ModelName
    queued_requests: int = 0
    queued_tokens: int = 0
    running_requests: int = 0
    running_tokens: int = 0
    """To within an eighth."""
    prompt_tokens: int = 0
    """Prompt tokens of requests, queued or running, that have no token yet from where they are
    now."""
    waiting_since_ns: int = 0
    """When the oldest request in the queue began to wait, by the gateway's clock
    (`GatewayLoad.sent_ns`); if the queue is empty, the oldest that has no token yet from where it
    is. 0: there is none."""
    asked_requests: int = 0
    """Requests that the gateway was asked for since it began."""
    asked_tokens: int = 0
    """Tokens of their prompts."""
    instance_requests: dict[InstanceId, int] = msgspec.field(default_factory=dict)
    """Requests of this gateway in flight on each instance that has any."""
    kept_out: dict[InstanceId, str] = msgspec.field(default_factory=dict)
    """Instances that the gateway sends nothing, or one request at a time, because they failed or
    are slow: why, in words. Full ones do not count."""

    explained: tuple[NodeId, ...] = ()
    """Nodes that died of a request which this gateway has refused for that just now. So no other
    request has killed them (`services.gateway.core.suspects`)."""

    @property
    def in_use(self) -> bool:
        """Whether the model has any load."""
        return bool(self.queued_requests or self.running_requests or self.instance_requests)


class GatewayLoad(Message, frozen=True, kw_only=True, tag="gateway_load"):
    gateway: GatewayId
    url: str = ""
    """The URL at which the gateway serves HTTP."""
    seq: int = 0
    """Counts up from the time when the gateway's process began, in milliseconds, so that another
    process that has its id goes on above it. A report with a lower number is late."""
    sent_ns: int = 0
    """What the gateway's clock showed when it sent this, in ns. It may be wrong by days, but it
    never jumps. 0: it does not say, as the release before; then its clock is taken to be right."""
    whole: bool = True
    """Whether models that are not named have no load. Otherwise their load is as it was said
    before."""
    models: tuple[ModelLoad, ...]
    listed: tuple[ModelName, ...] = ()
    """In a whole report: the models that the gateway takes requests for."""
    takes_changes: bool = False
    """Whether the gateway understands InstanceChange."""
