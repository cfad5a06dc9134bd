"""One system under one setting, in virtual time."""

from collections.abc import Callable

from simulation.results import SystemRun
from simulation.setting import Setting


def run_system(system: str, setting: Setting, progress: Callable[[float], None]) -> SystemRun:
    raise NotImplementedError(system)
