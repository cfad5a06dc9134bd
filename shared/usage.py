"""What each call used, as gateways write it down and operators sum it."""

import msgspec

from shared.ids import GatewayId, KeyId, ModelName, TenantId

KEEP_S = 35 * 86_400.0
"""How long records are kept."""
MAX_BYTES = 1 << 30
"""The most that all of them take in the store; the oldest go first. About ten million calls."""


class CallUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call that was let in, once it has ended."""

    tenant: TenantId
    key: KeyId
    """Empty: no key of a tenant's."""
    model: ModelName
    call: str
    """Its `X-Request-ID`."""
    ended_ns: int
    """By the gateway's wall clock."""
    took_s: float
    prompt: int = 0
    """Tokens of its prompts."""
    cached: int = 0
    """How many of them were found in a prefix cache."""
    generated: int = 0
    """Tokens of all its completions."""
    device_s: float = 0.0
    """Its share of the instances that it ran on, in seconds of a whole replica."""
    kv_gb_s: float = 0.0
    """Memory for its KV, times how long. 0 also where it is not known."""
    ttft_s: float = 0.0
    """From its arrival to its first token. 0: it got none, or is not for tokens."""
    tpot_s: float = 0.0
    """The mean time of a token after the first; of several completions the longest. 0: there was
    none."""
    queue_s: float = 0.0
    """How much of `ttft_s` it waited for an instance."""
    status: str = "done"
    """`done`, `cancelled` (the client left), or the code of an error."""


class UsageBatch(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the log."""

    gateway: GatewayId
    calls: tuple[CallUsage, ...]
