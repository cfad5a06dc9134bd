"""Every error that a part of the system may raise at another, with a code that crosses the wire.

Programs test `code`. The message says what was wrong and what to do about it.
"""

from typing import ClassVar


class LambdaScaleError(Exception):
    code: ClassVar[str] = "error"


class BadInput(LambdaScaleError):
    """The caller's input cannot be used. Nothing was changed."""

    code = "bad_input"


class ConfigError(LambdaScaleError):
    code = "config"


class NotFound(LambdaScaleError):
    code = "not_found"


class Conflict(LambdaScaleError):
    """The thing exists already, or is in a state that forbids the call."""

    code = "conflict"


class StaleEpoch(LambdaScaleError):
    """The sender speaks of a node generation, of a revision of an event or plan, or in a term, that
    is over."""

    code = "stale"


class Superseded(LambdaScaleError):
    """The process is not, or no longer, the active one of its role."""

    code = "superseded"


class CapacityExceeded(LambdaScaleError):
    """There is no room now (arena, KV cache, queue). The same call may succeed later or
    elsewhere."""

    code = "capacity"

    def __init__(self, message: str = "", retry_after_s: float | None = None) -> None:
        """`retry_after_s`: when it probably succeeds; None: not known. It does not cross the
        wire."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReady(LambdaScaleError):
    """Something that only some requests need has not arrived yet. The same call may succeed later
    or elsewhere; other requests succeed now."""

    code = "not_ready"


class SourceLost(NotReady):
    """A request was to come with its KV from another node, which was lost. That node may be dead,
    and the request may be why; or the request goes on there."""

    code = "source_lost"


class AdapterUnavailable(LambdaScaleError):
    """A request's adapter could not be loaded on a node. The node's other requests are not
    affected."""

    code = "adapter_unavailable"


class EngineFailed(LambdaScaleError):
    """A node's engine raised, or did not come back, while it ran the request and others."""

    code = "engine_failed"


class RequestKillsNodes(LambdaScaleError):
    """Two nodes died, or their engines failed, while they ran the request, the second while it was
    tried alone. It is never tried again."""

    code = "request_kills_nodes"


class PlanError(LambdaScaleError):
    """No plan exists for these inputs."""

    code = "plan"


class IllegalTransition(LambdaScaleError):
    """A state machine was asked for a step its table does not have; carries the history."""

    code = "illegal_transition"


# --- models -----------------------------------------------------------------


class ModelError(LambdaScaleError):
    code = "model"


class UnsupportedModel(ModelError):
    code = "unsupported_model"


class CorruptCheckpoint(ModelError):
    code = "corrupt_checkpoint"


class MissingTensor(ModelError):
    code = "missing_tensor"


class UnsafeCheckpoint(ModelError):
    """The checkpoint has only pickled weights, which run code when they are opened. They are never
    opened."""

    code = "unsafe_checkpoint"


# --- control bus ------------------------------------------------------------


class BusError(LambdaScaleError):
    code = "bus"


class BusTimeout(BusError):
    code = "bus_timeout"


class CutOff(BusTimeout):
    """No answer came, and whoever was asked is not why: for some of the time the process that asked
    was not connected to the bus, or did not know whether it may speak for its role. That is so for
    this process only: it crosses the wire as BusTimeout."""


class NoResponders(BusError):
    """Nobody serves the subject now."""

    code = "no_responders"


class NotPermitted(BusError):
    """The bus does not let this user say or hear that (`shared/permissions.py`)."""

    code = "not_permitted"


class BadMessage(BusError):
    """A message of an unknown kind or version, or that does not fit its schema."""

    code = "bad_message"


class MessageTooLarge(BusError):
    """The bus takes no message or value of this size, now or later."""

    code = "message_too_large"


class ServiceFailed(BusError):
    """A service had a bug while it worked on a request, or refused it with an error that only a
    later release knows. Whether it did anything is not known, as after BusTimeout."""

    code = "failed"


class KeyExists(BusError):
    """A create or a compare-and-set met another revision."""

    code = "key_exists"


# --- processes --------------------------------------------------------------


class StartFailed(LambdaScaleError):
    code = "start_failed"


# --- data plane -------------------------------------------------------------


class TransportError(LambdaScaleError):
    code = "transport"


class PeerLost(TransportError):
    """The connection to a peer broke, or the peer went silent."""

    code = "peer_lost"


class TransportTimeout(TransportError):
    code = "transport_timeout"


class ProtocolViolation(TransportError):
    """The peer sent what the protocol does not allow; its connection is closed."""

    code = "protocol"


class RegionUnknown(TransportError):
    """The peer has no such region, or the range lies outside it."""

    code = "region_unknown"


class ReadRefused(TransportError):
    """The peer does not let this node read that: it was shown no capability for it, or one that is
    not good."""

    code = "read_refused"


class DigestMismatch(TransportError):
    """Bytes arrived that do not match the manifest. They are dropped and fetched elsewhere."""

    code = "digest"


def as_typed(error: BaseException) -> LambdaScaleError:
    """The error itself, or, if it is a bug's, one that says so: for a supervised boundary."""
    if isinstance(error, LambdaScaleError):
        return error
    if isinstance(error, MemoryError):
        return CapacityExceeded(f"out of memory: {error}")
    return LambdaScaleError(f"bug: {error!r}")


def _all_errors() -> dict[str, type[LambdaScaleError]]:
    found: dict[str, type[LambdaScaleError]] = {}
    pending: list[type[LambdaScaleError]] = [LambdaScaleError]
    while pending:
        cls = pending.pop()
        found.setdefault(cls.code, cls)  # a kind without a code of its own is told as its parent
        pending.extend(cls.__subclasses__())
    return found


def from_code(code: str, message: str) -> LambdaScaleError:
    """The typed error that a peer reported. An unknown code becomes a plain LambdaScaleError."""
    return _all_errors().get(code, LambdaScaleError)(message)
