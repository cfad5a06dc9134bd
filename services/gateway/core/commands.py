"""The commands of the dispatch core to its shell, which carries them out in order. Each names its
cause: the id of the event that it follows from."""

import msgspec

from services.gateway.core.routing import Switch
from shared.errors import LambdaScaleError
from shared.ids import GatewayId, InstanceId, ModelId, ModelName, NodeId, RequestId
from shared.messages.instances import Instance
from shared.messages.serving import Cancel, Logprobs, Submit


class _Command(msgspec.Struct, frozen=True, kw_only=True):
    cause: str = ""


class Send(_Command, frozen=True, gc=False):
    """Hand the attempt to the node, and report what it answers."""

    node: NodeId
    submit: Submit


class Withdraw(_Command, frozen=True, gc=False):
    node: NodeId
    cancel: Cancel


class Emit(_Command, frozen=True, gc=False):
    """Give the client the request's next token."""

    request: RequestId
    token: int
    finish: str
    """`stop` or `length` if the request is done; empty if it goes on."""
    begun: Instance | None
    """The instance that gave it, if it is the first token of its attempt."""
    logprobs: Logprobs | None = None
    cached: int = 0
    """See `Token.cached`."""
    vector: bytes = b""
    """See `Token.vector`."""


class Scored(_Command, frozen=True, gc=False):
    """Give the client the log probabilities of the next tokens of the prompt."""

    request: RequestId
    logprobs: tuple[Logprobs, ...]


class End(_Command, frozen=True):
    """Tell the client that the request cannot be completed."""

    request: RequestId
    error: LambdaScaleError


class Resumed(_Command, frozen=True, gc=False):
    """Record that an attempt is over, and that the request goes on with the next attempt."""

    name: ModelName
    reason: str
    """`refused`, `failed`, `lost`, `gone` or `moved`."""
    detail: str


class Served(_Command, frozen=True):
    """Record that an instance gave its first token."""

    name: ModelName
    instance: Instance
    trace: str
    """The trace of the set that brought the instance."""
    submitted_at: float


class Switched(_Command, frozen=True, kw_only=True):
    """Record what a set did with the requests of its moving instances."""

    name: ModelName
    trace: str
    moved: tuple[RequestId, ...]
    stayed: int
    """Number of requests that better end where they are."""
    waiting: int
    """Number of requests that found no room elsewhere yet."""
    sources: tuple[InstanceId, ...]
    moved_costs: Switch | None
    """Mean costs of a request that moved; None: not known."""
    stayed_costs: Switch | None
    """Mean costs of a request that stayed."""


class Opened(_Command, frozen=True, gc=False):
    """Record that an instance gets no requests for a while."""

    name: ModelName
    why: str
    """`refused`, `failed`, `slow` or `wrong`."""


class Checked(_Command, frozen=True, gc=False):
    """Record that a replica was checked, and tell its node if it is wrong."""

    name: ModelName
    node: NodeId
    verdict: str
    """See `agreement.Verdict`."""


class AskWhetherAlive(_Command, frozen=True):
    """Find out which of these nodes have no process any more, and report it. An attempt of the
    request broke off there."""

    request: RequestId
    attempt: int
    nodes: tuple[NodeId, ...]
    surely: bool
    """Whether to ask again where no answer comes."""


class AskWhoDied(_Command, frozen=True):
    """Find out which of these nodes have no process any more, and report it. Instances of the model
    that lead over them are gone, and no request waits for the answer."""

    model_id: ModelId
    nodes: tuple[NodeId, ...]


class TellOfGone(_Command, frozen=True):
    """Tell nodes that another gateway is not heard any more: what it began may run for nobody."""

    gateway: GatewayId


class Broken(_Command, frozen=True):
    """Log that a model's state could not be trusted any more, and was made anew."""

    name: ModelName
    error: Exception


Piece = Scored | Emit | End
"""The pieces that a request's client gets, in order."""
Record = Resumed | Opened | Checked | Served | Switched
Command = Send | Withdraw | Piece | Record | AskWhetherAlive | AskWhoDied | TellOfGone | Broken
