"""What the dispatch core tells its shell to do, in order."""

import msgspec

from services.gateway.core.routing import Switch
from shared.errors import LambdaScaleError
from shared.ids import InstanceId, ModelName, NodeId, RequestId
from shared.messages.instances import Instance
from shared.messages.serving import Cancel, Logprobs, Submit


class Send(msgspec.Struct, frozen=True, gc=False):
    """Hand the attempt to the node and report what it answers."""

    node: NodeId
    submit: Submit


class Withdraw(msgspec.Struct, frozen=True, gc=False):
    node: NodeId
    cancel: Cancel


class Emit(msgspec.Struct, frozen=True, gc=False):
    """The request's next token, for its client."""

    request: RequestId
    token: int
    finish: str
    """`stop` or `length`: the request is done. Empty: it goes on."""
    first: bool
    """The first token of its attempt."""
    logprobs: Logprobs | None = None
    cached: int = 0
    """See `Token.cached`."""


class Scored(msgspec.Struct, frozen=True, gc=False):
    """The log probabilities of the next tokens of the request's prompt, for its client."""

    request: RequestId
    logprobs: tuple[Logprobs, ...]


class End(msgspec.Struct, frozen=True):
    """The request cannot be completed."""

    request: RequestId
    error: LambdaScaleError


class Resumed(msgspec.Struct, frozen=True, gc=False):
    """An attempt is over and the request goes on with the next one. For the record."""

    name: ModelName
    reason: str
    """`refused`, `failed`, `lost`, `gone` or `moved`."""
    detail: str


class Served(msgspec.Struct, frozen=True):
    """An instance gave its first token. For the record."""

    name: ModelName
    instance: Instance
    trace: str
    """Of the set that brought the instance."""
    submitted_at: float


class Switched(msgspec.Struct, frozen=True, kw_only=True):
    """What a set did with the requests of its moving instances. For the record."""

    name: ModelName
    trace: str
    moved: tuple[RequestId, ...]
    stayed: int
    """Requests that better end where they are."""
    waiting: int
    """Those that found no room elsewhere yet."""
    sources: tuple[InstanceId, ...]
    moved_costs: Switch | None
    """Of one request that moved, on average; None: not known."""
    stayed_costs: Switch | None
    """Of one that stayed."""


class Broken(msgspec.Struct, frozen=True):
    """A model's state could not be trusted any more and was made anew. For the log."""

    name: ModelName
    error: Exception


Piece = Scored | Emit | End
"""What a request's client gets, in order."""
Command = Send | Withdraw | Piece | Resumed | Served | Switched | Broken
