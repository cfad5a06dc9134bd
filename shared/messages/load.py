"""Load reports, every 100 ms on core NATS: what the planner decides by."""

import msgspec

from shared.ids import GatewayId, InstanceId, ModelName
from shared.messages.base import Message


class ModelLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One model at one gateway, now. Tokens are those still to prefill plus those to generate."""

    model: ModelName
    queued_requests: int
    queued_tokens: int
    running_requests: int
    running_tokens: int
    prompt_tokens: int = 0
    """Of requests, queued or running, that have no token yet from where they are now."""
    instance_requests: dict[InstanceId, int]
    """Requests in flight on each instance, from this gateway."""


class GatewayLoad(Message, frozen=True, kw_only=True, tag="gateway_load"):
    gateway: GatewayId
    url: str = ""
    """Where it serves HTTP."""
    models: tuple[ModelLoad, ...]
