"""Runs the systems of a comparison, each in its own process, so that no system can disturb another.

Their hash seeds are fixed, so a run gives the same numbers every time.
"""

import asyncio
import os
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from shared.errors import BadInput, LambdaScaleError
from simulation.results import SystemRun
from simulation.setting import Setting

ROOT = Path(__file__).parents[1]
COMMAND = (sys.executable, "-m", "simulation.process")
TELL_EVERY_S = 5.0


class SimulationFailed(LambdaScaleError):
    code = "simulation"


async def run_all(
    setting: Setting,
    systems: Sequence[str],
    *,
    jobs: int,
    tell: Callable[[str], None],
    command: Sequence[str] = COMMAND,
) -> dict[str, SystemRun]:
    """The runs in the order of `systems`, at most `jobs` at a time. `tell` gets the progress in
    words.

    The first failure ends the other runs, and so does cancelling. BadInput if the setting cannot be
    run; SimulationFailed for any other failure.
    """
    turns = asyncio.Semaphore(jobs)
    with tempfile.TemporaryDirectory(prefix="lambdascale-simulate-") as name:
        folder = Path(name)
        (folder / "setting").write_bytes(msgspec.msgpack.encode(setting))

        async def one(system: str) -> SystemRun:
            async with turns:
                return await _run(system, setting, folder, tell, command)

        async with asyncio.TaskGroup() as group:
            tasks = {system: group.create_task(one(system)) for system in systems}
    return {system: task.result() for system, task in tasks.items()}


async def _run(
    system: str,
    setting: Setting,
    folder: Path,
    tell: Callable[[str], None],
    command: Sequence[str],
) -> SystemRun:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = folder / system
    process = await asyncio.create_subprocess_exec(
        *command, system, str(folder / "setting"), str(result),
        env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": path},
        stdin=asyncio.subprocess.DEVNULL, stdout=PIPE, stderr=PIPE,
        # The terminal's Ctrl-C goes to this process, which then ends the other.
        start_new_session=True,
    )  # fmt: skip
    try:
        _, said = await asyncio.gather(_follow(process, system, setting, tell), _errors(process))
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code:
        raise _failure(system, code, said)
    run = msgspec.msgpack.decode(result.read_bytes(), type=SystemRun)
    tell(f"{system}: done")
    return run


async def _follow(
    process: Process, system: str, setting: Setting, tell: Callable[[str], None]
) -> None:
    assert process.stdout is not None
    began = told_at = time.monotonic()
    end_s = setting.trace[-1].arrival_s
    async for line in process.stdout:
        now = time.monotonic()
        if now - told_at >= TELL_EVERY_S:
            told_at = now
            at = min(float(line), end_s)  # beyond the end, the last requests run
            share = 100 * at / end_s if end_s else 100.0
            tell(f"{system}: {at:.0f} of {end_s:.0f} s ({share:.0f} %), {now - began:.0f} s taken")


async def _errors(process: Process) -> str:
    assert process.stderr is not None
    return (await process.stderr.read()).decode(errors="replace").strip()


def _failure(system: str, code: int, said: str) -> LambdaScaleError:
    last = said.rpartition("\n")[2] or f"exit code {code}"
    if code == 2:
        return BadInput(f"{system}: {last}")
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"lambdascale-{system}-", suffix=".log", delete=False
    ) as log:
        log.write(said)
    return SimulationFailed(f"the simulation of {system} failed: {last} (more in {log.name})")
