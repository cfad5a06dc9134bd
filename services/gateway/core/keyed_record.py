"""The record of an answer with an idempotency key, and what a `KeyedAnswer` asks of its shell."""

import msgspec

from shared.errors import LambdaScaleError
from shared.ids import GatewayId, ModelId
from shared.messages.serving import Logprobs


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """A token, as an instance gave it."""

    choice: int
    token: int
    finish: str = ""
    cached: int = 0
    logprobs: Logprobs | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    digest: str
    """Of the call and its body."""
    model_id: ModelId
    created: int
    """Seconds since the epoch, by the wall clock of the gateway that was asked first."""
    owner: GatewayId | None = None
    """None: nobody generates it now."""
    kept: tuple[Kept, ...] = ()
    """In the order in which the tokens of all choices came."""
    over: bool = False
    refused: str = ""
    """Why it is never generated again (RequestKillsNodes); empty if it may be."""


# --- what the shell is to do -----------------------------------------------------


class Look(msgspec.Struct, frozen=True):
    """Read the record."""


class Write(msgspec.Struct, frozen=True):
    record: Record
    revision: int
    """The revision that it replaces. 0: there is none."""


class Ask(msgspec.Struct, frozen=True):
    """Find out whether this gateway is connected."""

    gateway: GatewayId


class Generate(msgspec.Struct, frozen=True):
    """Generate what is missing of the answer."""


class Stop(msgspec.Struct, frozen=True):
    """Generate no longer."""


class Tell(msgspec.Struct, frozen=True):
    """Give the clients what another gateway generated."""

    kept: tuple[Kept, ...]


class Fail(msgspec.Struct, frozen=True):
    """Tell the clients that there will be no more."""

    error: LambdaScaleError


Work = Look | Write | Ask
"""Takes time. The shell does one after the other, and says how each ended."""
Effect = Generate | Stop | Tell | Fail
