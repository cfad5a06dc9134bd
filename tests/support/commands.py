"""The commands of `lambdascale` as a script would run them."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cli.main import main
from shared.parents import die_with_parent

LIMIT_S = 250.0


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


async def start(
    *words: str | Path, cwd: Path, environment: Mapping[str, str] | None = None
) -> asyncio.subprocess.Process:
    """Signals are as in a terminal, though a parent of the tests may ignore some (`nohup`)."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.cli",
        *map(str, words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=cwd,
        env=environment,
        preexec_fn=_as_in_a_terminal(),
    )


def _as_in_a_terminal() -> Callable[[], None]:
    """It ends with the tests, too, whatever kills them."""
    die = die_with_parent()

    def in_child() -> None:
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        die()

    return in_child


def run_here(*words: str) -> int:
    """The exit code of a command that runs in this process, which has imported torch already."""
    try:
        return main(words)
    except SystemExit as ended:
        return int(ended.code or 0)


async def run(*words: str | Path, cwd: Path) -> Ran:
    """Runs a command to its end."""
    process = await start(*words, cwd=cwd)
    try:
        async with asyncio.timeout(LIMIT_S):
            out, err = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    return Ran(process.returncode or 0, out.decode(), err.decode())
