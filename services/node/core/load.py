"""What an engine has to do, and what it has done since its start."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.ids import ModelId
from shared.step_costs import StepCosts


@dataclass(frozen=True, slots=True)
class HostTierLoad:
    """The host tier of KV: see `services.node.core.kv_host`."""

    nbytes: int = 0
    """Its size; 0: there is none."""
    used: int = 0
    saved: int = 0
    """Pages copied to it since the start, and in `restored` those copied back."""
    restored: int = 0
    tokens: int = 0
    """Tokens of sequences that went on with KV from it, since the start."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    running: int = 0
    """Sequences that this node leads or is a stage of."""
    waiting: int = 0
    kv_used: int = 0
    kv_capacity: int = 0
    kv_shares: Mapping[ModelId, int] = field(default_factory=dict)
    """The positions that each open model can have however much the others need."""
    kv_position_bytes: Mapping[ModelId, int] = field(default_factory=dict)
    """The bytes of a position's KV, of each open model."""
    tokens_out: int = 0
    """Tokens drawn here since the start."""
    prompt_tokens: int = 0
    """Tokens with which sequences began that are led here, since the start."""
    cached_tokens: int = 0
    """How many of `prompt_tokens` had their KV in the prefix cache."""
    received_tokens: int = 0
    """Tokens whose KV came from another node."""
    kv_sent_bytes: int = 0
    """Bytes of KV that other nodes were lent since the start, and that came from others."""
    kv_received_bytes: int = 0
    host_tier: HostTierLoad = HostTierLoad()
    preemptions: int = 0
    """How often since the start a sequence gave its KV back to make room for others."""
    tokens_proposed: int = 0
    """Tokens proposed by speculation since the start, for sequences led here. `tokens_accepted` of
    them were drawn."""
    tokens_accepted: int = 0
    violations: int = 0
    """Messages of peers that were malformed or out of place."""
    costs: tuple[StepCosts, ...] = ()
    """See `Engine.costs`."""
    faults: int = 0
    """Bugs that were contained: see the log."""
