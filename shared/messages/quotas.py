"""What gateways tell each other of tenants' use, so that a limit holds over all of them together.

Counts are sums since the gateway began, so the next report makes up for one that was lost.
"""

import msgspec

from shared.ids import GatewayId
from shared.messages.base import Message


class AccountUse(msgspec.Struct, frozen=True, array_like=True):
    requests: int
    """Calls that this gateway let in, less those of which nothing came."""
    tokens: int
    """Tokens that it charged, less those that it gave back."""
    running: int
    """Completions that run now."""
    requests_left: float
    """What may be used at once, of all gateways together, as far as this one knows. Below 0: more
    was used than the limit lets."""
    tokens_left: float
    life: int
    """The sums begin anew with another number."""


class GatewayUse(Message, frozen=True, kw_only=True, tag="gateway_use"):
    """Gateway -> gateways, 20 times a second while use changes, and whole every second."""

    gateway: GatewayId
    accounts: dict[str, AccountUse]
    whole: bool
    """Whether all accounts are named that were used lately. Otherwise those that have changed."""
