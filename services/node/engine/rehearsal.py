"""What a decode step costs on this machine, for each number of processes that may run it together
(services/node/core/degrees.py chooses by that). A step is not run: its parts are, with weights that
are zero.
"""

import fcntl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from services.node.compiling import cache_folder
from services.node.core.degrees import degrees_for
from services.node.engine import kernels
from services.node.engine.huge_pages import HugePages
from services.node.engine.linear import Form, Packed
from services.node.engine.orders import Meet, Rehearse
from services.node.engine.ranks import Lead, Ranks
from services.node.engine.share import WHOLE, Among
from services.node.engine.team import Team, use_threads
from shared.step_costs import StepCosts

INPUTS, OUTPUTS = 4096, 16384
"""The shape of the matrix that is read: 256 MiB of float32. A matrix of 64 MiB lies mostly in the
cache of a large server, and is read twice as fast as a model's weights."""
LAYERS = 16
READS = 4
TIMES = 10
"""How often the matrix is read in a turn, and each other act is repeated."""
TURNS = 3
"""Degrees take turns, so that a drift of the machine affects all alike."""
LIMIT_S = 2.0
"""After this time no further turn begins: on a busy machine a turn may take seconds."""
GIVE_UP_S = 60.0
"""After this time the ranks are given up: one of them does not come."""
PARTS = 2
"""Threads and ranks are called twice in a step: for the layers, and for the head."""


@dataclass(frozen=True, slots=True)
class Times:
    """What each repetition took, in seconds."""

    reads: list[float] = field(default_factory=list)
    """To read the whole matrix."""
    waits: list[float] = field(default_factory=list)
    """To wait for each other in LAYERS layers with nothing to do."""
    calls: list[float] = field(default_factory=list)
    """To call threads and ranks for one part of a step."""


def tried(threads: int, form: Form, devices: int = 1) -> tuple[int, ...]:
    """The degrees beside 1 that are worth measuring on a CPU. `threads`: as for TorchEngine.
    `devices`: how many devices of the machine may run a model together."""
    if form == "stored" or kernels.load() is None:
        return ()
    return degrees_for(devices * (threads or torch.get_num_threads()))


@torch.inference_mode()
def measure(
    ranks: Ranks,
    threads: int,
    form: Form,
    compiled: kernels.Kernels,
    *,
    devices: int = 1,
    give_up_s: float = GIVE_UP_S,
) -> tuple[StepCosts, ...]:
    """The costs of each degree that can be run, 1 among them, with the threads of this device, and
    of more, up to `devices` together. `ranks` have been started. A team that is lost meanwhile is
    left out."""
    nbytes = INPUTS * OUTPUTS * (1 if form == "int8" else 4)
    times = {
        (degree, count): Times()
        for count in range(1, devices + 1)
        for degree in (1, *ranks.degrees)
        if degree == 1 or degree <= threads * count
    }
    with _in_turn(devices), _at_most(give_up_s, ranks):
        began = time.perf_counter()
        for turn in range(TURNS):
            if turn and time.perf_counter() - began > LIMIT_S:
                break
            for (degree, count), known in times.items():
                if degree not in (1, *ranks.degrees):
                    continue
                team = ranks.teams.get(degree)
                own = team.threads(count) if team else threads * count
                if team:
                    team.tell(Rehearse(degree, count))
                rehearse(team, own, form, compiled, known)
                call = _calls(team, compiled, own)
                known.calls.extend(_seconds(call) for _ in range(TIMES))
        ranks.settle()
    # The fastest repetition counts: other programs, which are busy while a node starts, disturb it
    # least.
    return tuple(
        StepCosts(
            degree=degree,
            bytes_per_s=nbytes / min(each.reads),
            layer_s=min(each.waits) / LAYERS,
            step_s=PARTS * min(each.calls),
            devices=count,
            int8=form == "int8",
        )
        for (degree, count), each in times.items()
        if degree in (1, *ranks.degrees)
    )


@contextmanager
def _in_turn(devices: int) -> Iterator[None]:
    """In the context, no other node of this user measures what several devices do. Nodes of one
    machine start together, and would take the same threads from each other."""
    if devices == 1:
        yield
        return
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rehearsal.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _at_most(seconds: float, ranks: Ranks) -> Iterator[None]:
    """Gives the ranks up if what they do in the context takes longer: then it goes on without
    them."""
    why = f"its ranks did not end their rehearsal within {seconds:.0f} s"
    late = threading.Timer(seconds, ranks.give_up, [why])
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def rehearse(
    team: Team | None, threads: int, form: Form, compiled: kernels.Kernels, times: Times
) -> None:
    """Reads and waits, and adds the times. All ranks of the team call it together. `team`: None:
    this process is alone. `threads`: of this process."""
    use_threads(threads)
    share = team.share if team else WHOLE
    own = share.outputs(OUTPUTS)
    matrix = Packed(
        compiled,
        torch.zeros(len(own), INPUTS),
        None,
        form,
        HugePages(len(own) * INPUTS * 4),
        Among(own.start, OUTPUTS),
    )
    x, made = torch.ones(1, INPUTS), torch.empty(1, OUTPUTS)
    waits = _waits(team, compiled, threads, LAYERS)
    nothing = _waits(None, compiled, threads, 0)

    def read() -> None:
        matrix.write(x, made)
        if team:
            team.meet()

    for act, count, seconds in ((read, READS, times.reads), (waits, TIMES, times.waits)):
        for _ in range(count):
            nothing()  # all threads are awake, and
            if team:
                team.meet()  # all ranks begin together
            seconds.append(_seconds(act))


def _waits(
    team: Team | None, compiled: kernels.Kernels, threads: int, layers: int
) -> Callable[[], None]:
    waits = kernels.Waits(
        n_blocks=layers,
        wait=compiled.barrier if threads > 1 else None,
        team=team.address if team else None,
    )
    return lambda: compiled.run(waits, threads)


def _calls(team: Lead | None, compiled: kernels.Kernels, threads: int) -> Callable[[], None]:
    """Calls threads and ranks for nothing. `threads`: of this process."""
    if team is None:
        return _waits(None, compiled, threads, 0)

    def call() -> None:
        team.tell(Meet(team.share.of))
        _waits(None, compiled, threads, 0)()
        team.meet()

    return call


def _seconds(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
