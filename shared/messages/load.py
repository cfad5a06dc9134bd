"""Load reports of gateways on core NATS, by which the planner decides: up to ten a second, and at
once when requests begin to wait."""

import msgspec

from shared.ids import GatewayId, InstanceId, ModelName
from shared.messages.base import Message


class ModelLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one model at one gateway, now. Tokens count if they are still to prefill or to
    generate."""

    model: ModelName
    queued_requests: int
    queued_tokens: int
    running_requests: int
    running_tokens: int
    prompt_tokens: int = 0
    """Prompt tokens of requests, queued or running, that have no token yet from where they are
    now."""
    waiting_since_ns: int = 0
    """When the oldest request in the queue began to wait, by the wall clock; if the queue is empty,
    the oldest that has no token yet from where it is. 0: there is none."""
    asked_requests: int = 0
    """Requests that the gateway was asked for since it began."""
    asked_tokens: int = 0
    """Tokens of their prompts."""
    instance_requests: dict[InstanceId, int]
    """Requests of this gateway in flight on each instance."""


class GatewayLoad(Message, frozen=True, kw_only=True, tag="gateway_load"):
    gateway: GatewayId
    url: str = ""
    """The URL at which the gateway serves HTTP."""
    models: tuple[ModelLoad, ...]
