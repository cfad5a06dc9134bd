"""Services whose cores are validated while they run.

What a core's `validate` finds is raised there, and kept in `found`, because the services contain
errors: `Cluster` raises what was found when it ends.
"""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from services.gateway.core.commands import Broken
from services.gateway.core.commands import Command as GatewayCommand
from services.gateway.core.dispatch import Dispatch
from services.gateway.core.keyed import KeyedAnswer
from services.gateway.keyed_answers import KeyedAnswers
from services.gateway.service import GatewayService
from services.node.core.batching import Batcher
from services.node.core.host_cache import CacheBook
from services.node.core.pulling import Pulls
from services.node.core.residency import Residency
from services.node.moving.mover import Mover
from services.planner.core.commands import Command, Log
from services.planner.core.planner import Planner
from services.planner.core.stimuli import Stimulus
from services.planner.core.tickets import Moment
from services.planner.service import PlannerService
from services.registry.core.pool import Pool
from services.registry.service import RegistryService

P = ParamSpec("P")
T = TypeVar("T")


class Core(Protocol):
    def validate(self) -> None:
        """Raises if parts of the state contradict each other."""


C = TypeVar("C", bound=Core)
found: list[Exception] = []
"""What was found in this process, and has not been raised by `raise_found`."""


def raise_found() -> None:
    """AssertionError if a core was found to contradict itself since the last call."""
    wrong, found[:] = found[:], []
    if wrong:
        raise AssertionError(f"{len(wrong)} contradictions in cores") from wrong[0]


def _validated(act: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    @wraps(act)
    def acting(core: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result = act(core, *args, **kwargs)
        _check(core)
        return result

    return acting


def _sound(
    step: Callable[Concatenate[Residency, P], Residency],
) -> Callable[Concatenate[Residency, P], Residency]:
    """A step whose result is validated, since a residency does not change itself."""

    @wraps(step)
    def stepping(residency: Residency, /, *args: P.args, **kwargs: P.kwargs) -> Residency:
        result = step(residency, *args, **kwargs)
        _check(result)
        return result

    return stepping


def _check(core: Core) -> None:
    try:
        core.validate()
    except Exception as error:
        found.append(error)
        raise


# --- the planner ------------------------------------------------------------


class CheckedCore(Planner):
    """Is validated after every stimulus. Raises where the real one would log an error and go on."""

    def handle(self, stimulus: Stimulus, now: Moment) -> list[Command]:
        commands = super().handle(stimulus, now)
        for command in commands:
            if isinstance(command, Log) and command.error is not None:
                raise AssertionError(f"{command.text} at {stimulus}") from command.error
        _check(self)
        return commands


class CheckedPlanner(PlannerService):
    core_type = CheckedCore


# --- the registry -----------------------------------------------------------


class CheckedPool(Pool):
    """Is validated after every event and every request that changes it."""

    restore = _validated(Pool.restore)
    start = _validated(Pool.start)
    lease_put = _validated(Pool.lease_put)
    lease_dropped = _validated(Pool.lease_dropped)
    leases_are = _validated(Pool.leases_are)
    status = _validated(Pool.status)
    set_duty = _validated(Pool.set_duty)
    leave = _validated(Pool.leave)
    order_failed = _validated(Pool.order_failed)
    tick = _validated(Pool.tick)
    reserve = _validated(Pool.reserve)
    unreserve = _validated(Pool.unreserve)


class CheckedRegistry(RegistryService):
    pool_type = CheckedPool


# --- the gateway ------------------------------------------------------------


class CheckedDispatch(Dispatch):
    """Is validated after every event. A model whose state had to be made anew is an error, too."""

    take_id = _validated(Dispatch.take_id)
    add_model = _validated(Dispatch.add_model)
    remove_model = _validated(Dispatch.remove_model)
    on_instances = _validated(Dispatch.on_instances)
    on_node_gone = _validated(Dispatch.on_node_gone)
    admit = _validated(Dispatch.admit)
    finish = _validated(Dispatch.finish)
    cancel = _validated(Dispatch.cancel)
    on_tokens = _validated(Dispatch.on_tokens)
    on_not_taken = _validated(Dispatch.on_not_taken)
    on_taken = _validated(Dispatch.on_taken)
    on_judged = _validated(Dispatch.on_judged)
    on_found_dead = _validated(Dispatch.on_found_dead)
    on_load = _validated(Dispatch.on_load)
    on_tick = _validated(Dispatch.on_tick)

    def _flush(self) -> list[GatewayCommand]:
        commands = super()._flush()
        found.extend(each.error for each in commands if isinstance(each, Broken))
        for each in commands:
            assert each.cause, f"nothing caused {each}"
        return commands


class CheckedAnswer(KeyedAnswer):
    """Is validated after every event, and after each work that it has decided on."""

    due = _validated(KeyedAnswer.due)
    written = _validated(KeyedAnswer.written)
    refused = _validated(KeyedAnswer.refused)
    unanswered = _validated(KeyedAnswer.unanswered)
    looked = _validated(KeyedAnswer.looked)
    asked = _validated(KeyedAnswer.asked)
    generated = _validated(KeyedAnswer.generated)
    ended = _validated(KeyedAnswer.ended)
    failed = _validated(KeyedAnswer.failed)
    readers = _validated(KeyedAnswer.readers)
    tick = _validated(KeyedAnswer.tick)
    leave = _validated(KeyedAnswer.leave)


class CheckedAnswers(KeyedAnswers):
    core_type = CheckedAnswer


class CheckedGateway(GatewayService):
    dispatch_type = CheckedDispatch
    answers_type = CheckedAnswers


# --- nodes ------------------------------------------------------------------


class CheckedBatcher(Batcher):
    """Is validated after every event, and after every step that it has decided."""

    submit = _validated(Batcher.submit)
    cancel = _validated(Batcher.cancel)
    received = _validated(Batcher.received)
    prepared = _validated(Batcher.prepared)
    peer_lost = _validated(Batcher.peer_lost)
    model_closed = _validated(Batcher.model_closed)
    give_up = _validated(Batcher.give_up)
    close = _validated(Batcher.close)
    take = _validated(Batcher.take)
    join = _validated(Batcher.join)
    ran = _validated(Batcher.ran)
    failed = _validated(Batcher.failed)
    refused = _validated(Batcher.refused)
    no_room = _validated(Batcher.no_room)


class CheckedPulls(Pulls):
    """Is validated after every event."""

    apply = _validated(Pulls.apply)
    hold = _validated(Pulls.hold)
    give_up = _validated(Pulls.give_up)
    close = _validated(Pulls.close)
    verified = _validated(Pulls.verified)
    read = _validated(Pulls.read)
    failed = _validated(Pulls.failed)
    stopped = _validated(Pulls.stopped)


class CheckedMover(Mover):
    pulls_type = CheckedPulls


class CheckedResidency(Residency):
    """Is validated after every step."""

    inherit = _sound(Residency.inherit)
    follow = _sound(Residency.follow)
    activate = _sound(Residency.activate)
    hold = _sound(Residency.hold)
    run = _sound(Residency.run)
    stand_by = _sound(Residency.stand_by)


class CheckedBook(CacheBook):
    """Is validated after every step."""

    begin = _validated(CacheBook.begin)
    complete = _validated(CacheBook.complete)
    give_up = _validated(CacheBook.give_up)
    lend = _validated(CacheBook.lend)
    withdraw = _validated(CacheBook.withdraw)
    drop = _validated(CacheBook.drop)
