"""The services with their cores' state validated after every stimulus."""

from services.planner.core.commands import Command, Log
from services.planner.core.planner import Planner
from services.planner.core.stimuli import Stimulus
from services.planner.core.tickets import Moment
from services.planner.service import PlannerService


class CheckedCore(Planner):
    """Raises where the real one would log an error and go on."""

    def handle(self, stimulus: Stimulus, now: Moment) -> list[Command]:
        commands = super().handle(stimulus, now)
        for command in commands:
            if isinstance(command, Log) and command.error is not None:
                raise AssertionError(f"{command.text} at {stimulus}") from command.error
        self.validate()
        return commands


class CheckedPlanner(PlannerService):
    core_type = CheckedCore
