"""Virtual machines that run one job each, alone or two on one wire."""

import asyncio
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from services.local.processes import die_with_parent
from tests.rdma.image import Image

REPOSITORY = Path(__file__).parents[2]
DEVICE = "rxe0"
GID_INDEX = 1
"""The IPv4 address's."""
_BEGINS, _ENDED = "[job begins]", "[job ended: "
BOOT_S = 400.0
"""A bound only: it takes 5 s where there is a core for it."""


@dataclass(frozen=True, slots=True)
class Plug:
    """One machine's end of a wire: its address and what QEMU is told."""

    address: str
    arguments: tuple[str, ...]


class Wire:
    """Between two machines; that of `first` must have begun before the other starts."""

    def __init__(self, path: Path) -> None:
        """`path` is that of a Unix socket, to be made."""
        self.first = self._plug(path, 1, "on")
        self.second = self._plug(path, 2, "off")

    def _plug(self, path: Path, number: int, server: str) -> Plug:
        mac = f"52:54:00:00:00:{number:02x}"
        return Plug(
            f"10.9.0.{number}",
            (
                *("-netdev", f"stream,id=wire,server={server},addr.type=unix,addr.path={path}"),
                *("-device", f"virtio-net-pci,netdev=wire,mac={mac},romfile=,host_mtu=9000"),
            ),
        )


ALONE = Plug("10.9.0.1", ())


class Machine:
    """A guest on this machine's files (writes go to its memory), with one RDMA device, DEVICE.

    It runs `command` in REPOSITORY as root and ends with it. `directory` holds what it is told
    and its console.
    """

    def __init__(
        self,
        image: Image,
        directory: Path,
        command: Sequence[str],
        *,
        plug: Plug = ALONE,
        memory_mib: int = 1536,
        environment: Mapping[str, str],
    ) -> None:
        self.output = ""
        """What the job has printed."""
        self._image = image
        self._console = directory / "console"
        self._process: asyncio.subprocess.Process | None = None
        job = directory / "job"
        variables = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", **environment}
        exports = (f"export {name}={shlex.quote(value)}" for name, value in variables.items())
        steps = (*exports, f"cd {shlex.quote(str(REPOSITORY))}", f"exec {shlex.join(command)}")
        directory.mkdir(parents=True, exist_ok=True)
        job.write_text("\n".join(steps) + "\n")
        tools = image.emulator / "usr"
        self._arguments = [
            *(str(tools / "bin/qemu-system-x86_64"), "-nodefaults", "-display", "none"),
            *("-L", str(tools / "share/qemu"), "-L", str(tools / "share/seabios")),
            *("-machine", "pc", "-accel", "tcg,thread=multi", "-cpu", "max", "-no-reboot"),
            *("-m", str(memory_mib), "-smp", "1", "-device", "virtio-rng-pci"),
            *("-serial", f"file:{self._console}", "-serial", "stdio"),
            *("-kernel", str(image.kernel), "-initrd", str(image.initramfs), "-append"),
            "cryptomgr.notests console=ttyS0 quiet panic=-1 mitigations=off random.trust_cpu=on "
            f"address={plug.address} job={job}",
            *_share("host", Path("/")),
            *_share("overlay", image.overlay),
            *plug.arguments,
        ]

    async def __aenter__(self) -> Self:
        """Its job begins."""
        libraries = self._image.emulator / "usr/lib/x86_64-linux-gnu"
        also = self._image.emulator / "lib/x86_64-linux-gnu"
        self._process = await asyncio.create_subprocess_exec(
            *self._arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent(),
            env={
                **os.environ,
                "LD_LIBRARY_PATH": f"{libraries}:{also}",
                "QEMU_MODULE_DIR": str(libraries / "qemu"),
            },
        )
        try:
            await self.until(_BEGINS, timeout=BOOT_S)
        except BaseException:
            await self.__aexit__(*sys.exc_info())
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.kill()
        if exc_type is not None:
            print(self._report(), file=sys.stderr)

    async def kill(self) -> None:
        """As a power cut would; nothing if it has ended."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def until(self, text: str, *, timeout: float) -> str:
        """The line in which the job says `text`. AssertionError: it did not."""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    line = await self._line()
                    if text in line:
                        return line
                    if not line or line.startswith(_ENDED):
                        raise AssertionError(f"the job ended before it said {text!r}")
        except TimeoutError:
            raise AssertionError(f"the guest did not say {text!r} within {timeout} s") from None

    async def ended(self, *, timeout: float) -> int:
        """The job's exit code. AssertionError: it has none by then."""
        line = await self.until(_ENDED, timeout=timeout)
        return int(line.removeprefix(_ENDED).rstrip("]\n"))

    async def _line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode(errors="replace")
        self.output += line
        return line

    def _report(self) -> str:
        console = self._console.read_text(errors="replace") if self._console.exists() else ""
        code = self._process.returncode if self._process else None
        return (
            f"--- the job said\n{self.output}\n"
            f"--- the guest's console (QEMU ended with {code})\n{console[-3000:]}"
        )


def _share(tag: str, path: Path) -> list[str]:
    """A folder that the guest may read, by 9p."""
    options = "security_model=none,readonly=on,multidevs=remap"
    return ["-virtfs", f"local,mount_tag={tag},path={path},{options}"]
