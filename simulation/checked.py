"""Services whose cores are validated while they run."""

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from services.planner.core.commands import Command, Log
from services.planner.core.planner import Planner
from services.planner.core.stimuli import Stimulus
from services.planner.core.tickets import Moment
from services.planner.service import PlannerService
from services.registry.core.pool import Pool
from services.registry.service import RegistryService

P = ParamSpec("P")
T = TypeVar("T")


class CheckedCore(Planner):
    """Is validated after every stimulus. Raises where the real one would log an error and go on."""

    def handle(self, stimulus: Stimulus, now: Moment) -> list[Command]:
        commands = super().handle(stimulus, now)
        for command in commands:
            if isinstance(command, Log) and command.error is not None:
                raise AssertionError(f"{command.text} at {stimulus}") from command.error
        self.validate()
        return commands


class CheckedPlanner(PlannerService):
    core_type = CheckedCore


def _validated(
    act: Callable[Concatenate[Pool, P], T],
) -> Callable[Concatenate[Pool, P], T]:
    def acting(pool: Pool, /, *args: P.args, **kwargs: P.kwargs) -> T:
        found = act(pool, *args, **kwargs)
        pool.validate()
        return found

    return acting


class CheckedPool(Pool):
    """Is validated after every change of leases and reservations, and at every tick. Reports of
    nodes are too many for that: the next tick follows them."""

    restore = _validated(Pool.restore)
    lease_put = _validated(Pool.lease_put)
    lease_dropped = _validated(Pool.lease_dropped)
    leases_are = _validated(Pool.leases_are)
    tick = _validated(Pool.tick)
    reserve = _validated(Pool.reserve)
    unreserve = _validated(Pool.unreserve)


class CheckedRegistry(RegistryService):
    pool_type = CheckedPool
