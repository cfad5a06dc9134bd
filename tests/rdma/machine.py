"""A virtual machine with two RDMA adapters on one wire, which runs Python modules."""

import asyncio
import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from shared.parents import die_with_parent
from tests.rdma.guest.agent import End, Ended, Order, Ready, Report, Run, Said
from tests.rdma.image import Image

REPOSITORY = Path(__file__).parents[2]
GID_INDEX = 1
"""The IPv4 address's."""
CPU = "Nehalem"
"""The oldest that NumPy runs on. For a newer one libraries use wider vectors, and to emulate those
takes longer."""
BOOT_S = 600.0
END_S = 60.0
"""Bounds only. Where there is a core for it, the kernel boots in 5 s, and torch takes 30 s to be
imported."""
PRIORITY = -10
"""As of nice(1). The guest's services are timed by real clocks, and an emulated processor is slow
as it is: what runs beside it has to wait."""
POWER_CUT = -9
"""The exit code of the jobs of a machine that ended before them."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One end of the wire."""

    number: int

    @property
    def device(self) -> str:
        return f"rxe{self.number}"

    @property
    def interface(self) -> str:
        return f"eth{self.number}"

    @property
    def address(self) -> str:
        return f"10.9.0.{self.number + 1}"


ADAPTERS = Adapter(0), Adapter(1)


class Job:
    """A module that runs in a machine."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.output = ""
        """What it has printed."""
        self.over = False
        self._reports: asyncio.Queue[Said | Ended] = asyncio.Queue()

    def hear(self, report: Said | Ended) -> None:
        if isinstance(report, Said):
            self.output += report.line + "\n"
        else:
            self.over = True
        self._reports.put_nowait(report)

    async def until(self, text: str, *, timeout: float) -> str:
        """The line in which the job says `text`. AssertionError: it did not."""
        try:
            async with asyncio.timeout(timeout):
                while isinstance(report := await self._reports.get(), Said):
                    if text in report.line:
                        return report.line
        except TimeoutError:
            raise AssertionError(f"the job did not say {text!r} within {timeout} s") from None
        raise AssertionError(f"the job ended with {report.code} before it said {text!r}")

    async def ended(self, *, timeout: float) -> int:
        """The job's exit code. AssertionError: it has none by then."""
        try:
            async with asyncio.timeout(timeout):
                while isinstance(report := await self._reports.get(), Said):
                    pass
        except TimeoutError:
            raise AssertionError(f"the job did not end within {timeout} s") from None
        return report.code


class Machine:
    """A guest on this machine's files (writes go to its memory), with ADAPTERS.

    As root in REPOSITORY it runs what it is told to (guest/agent.py), with the modules `preload`
    imported beforehand; unless they are told otherwise, they use the first adapter. `directory`
    holds its first script and its console.
    """

    def __init__(
        self,
        image: Image,
        directory: Path,
        *,
        preload: Sequence[str],
        memory_mib: int,
    ) -> None:
        self._image = image
        self._console = directory / "console"
        self._jobs: dict[int, Job] = {}
        self._numbers = itertools.count(1)
        self._ready = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._listener: asyncio.Task[None] | None = None
        script = directory / "script"
        variables = {
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "LS_RDMA_DEVICE": ADAPTERS[0].device,
            "LS_RDMA_GID_INDEX": str(GID_INDEX),
        }
        exports = (f"export {name}={shlex.quote(value)}" for name, value in variables.items())
        agent = [sys.executable, "-m", "tests.rdma.guest.agent", *preload]
        steps = (*exports, f"cd {shlex.quote(str(REPOSITORY))}", f"exec {shlex.join(agent)}")
        directory.mkdir(parents=True, exist_ok=True)
        script.write_text("\n".join(steps) + "\n")
        tools = image.emulator / "usr"
        self._arguments = [
            *(str(tools / "bin/qemu-system-x86_64"), "-nodefaults", "-display", "none"),
            *("-L", str(tools / "share/qemu"), "-L", str(tools / "share/seabios")),
            *("-machine", "pc", "-accel", "tcg,thread=multi", "-cpu", CPU, "-no-reboot"),
            *("-m", str(memory_mib), "-smp", "1", "-device", "virtio-rng-pci"),
            *("-serial", f"file:{self._console}", "-serial", "stdio"),
            *("-kernel", str(image.kernel), "-initrd", str(image.initramfs), "-append"),
            f"cryptomgr.notests console=ttyS0 quiet panic=-1 mitigations=off script={script}",
            *_share("host", Path("/")),
            *_share("overlay", image.overlay),
        ]

    async def __aenter__(self) -> Self:
        """It is switched on; `run` waits until it is ready."""
        libraries = self._image.emulator / "usr/lib/x86_64-linux-gnu"
        also = self._image.emulator / "lib/x86_64-linux-gnu"
        self._process = await asyncio.create_subprocess_exec(
            *self._arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=_before(die_with_parent()),
            env={
                **os.environ,
                "LD_LIBRARY_PATH": f"{libraries}:{also}",
                "QEMU_MODULE_DIR": str(libraries / "qemu"),
            },
        )
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """As a power cut would."""
        assert self._process is not None
        assert self._listener is not None
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        await self._listener

    @asynccontextmanager
    async def run(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> AsyncIterator[Job]:
        """Runs a module as `python -m` would, with more environment variables. It ends with this
        context."""
        try:
            async with asyncio.timeout(BOOT_S):
                await self._ready.wait()
        except TimeoutError:
            raise AssertionError(f"no machine within {BOOT_S} s: {self._last_words()}") from None
        job = Job(next(self._numbers))
        self._jobs[job.number] = job
        await self._order(Run(job.number, module, arguments, dict(environment or {})))
        try:
            yield job
        except BaseException:
            print(f"--- {module} said\n{job.output}\n{self._last_words()}", file=sys.stderr)
            raise
        finally:
            if not job.over:
                await self._order(End(job.number))
                await job.ended(timeout=END_S)

    async def _order(self, order: Order) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        await self._process.stdin.drain()

    async def _listen(self) -> None:
        """Until the machine is off, which ends its jobs."""
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            report: Report = msgspec.json.decode(line, type=Report)
            if isinstance(report, Ready):
                self._ready.set()
            else:
                self._jobs[report.job].hear(report)
        for job in self._jobs.values():
            if not job.over:
                job.hear(Ended(job.number, POWER_CUT))

    def _last_words(self) -> str:
        console = self._console.read_text(errors="replace") if self._console.exists() else ""
        code = self._process.returncode if self._process else None
        return f"--- the guest's console (QEMU ended with {code})\n{console[-3000:]}"


def _before(die: Callable[[], None]) -> Callable[[], None]:
    """What the emulator's process does first."""

    def run() -> None:
        die()
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)

    return run


def _share(tag: str, path: Path) -> list[str]:
    """A folder that the guest may read, by 9p."""
    options = "security_model=none,readonly=on,multidevs=remap"
    return ["-virtfs", f"local,mount_tag={tag},path={path},{options}"]
