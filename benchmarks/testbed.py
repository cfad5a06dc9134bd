"""Many hosts on one machine: network namespaces joined by shaped, full-duplex links.

    host 0 [data]--+              +--[data] host 2
    host 1 [data]--+ rack 0 --o-- rack 1 +--[data] host 3       o: the core, where there are racks
       [control]------- control -------[control]

Each host is a network namespace with two links. `data` goes to its rack's switch (a bridge) and is
shaped at both ends, so that it carries its rate each way; racks reach each other through trunks of
a rate of their own. `control` is not shaped. The switches are in a namespace too, the hub, which
is on the control network and nowhere else.

The namespaces have no names: they are open files of this process and go when it and the processes
that it started in them do. Those die with it, so that nothing is left behind, whatever kills it.
Nothing is changed outside of the namespaces. Needs root, and `ip` and `tc` (package iproute2).
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from shared.errors import BadInput, ConfigError
from shared.parents import die_with_parent

MOST_HOSTS = 200
FRAME_BYTES, SEGMENT_BYTES = 1514, 1448
"""Bytes on the wire, and bytes of data in them: what TCP makes of Ethernet."""
BURST = 68 * 1024
"""A link's token bucket: one whole segment (64 KiB and its headers), the least that is possible. A
deeper bucket would hide the time that a pipeline takes to fill."""
QUEUE = 2 << 20
CONTROL_GATE = "10.78.0.1"
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    hosts: int
    link_mbit: float
    """10^6 bits/s on the wire, in each direction."""
    racks: tuple[int, ...] = ()
    """The number of hosts of each rack, in order. Empty: all are on one switch."""
    trunk_mbit: float = 0.0
    """For each rack's trunk, in each direction."""

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise BadInput(f"{self.hosts} hosts: a testbed has 1 to {MOST_HOSTS}")
        if self.racks and (sum(self.racks) != self.hosts or min(self.racks) < 1):
            raise BadInput(f"racks of {self.racks} hosts do not make up {self.hosts}")
        if self.link_mbit <= 0 or (self.racks and self.trunk_mbit <= 0):
            raise BadInput("links and trunks need a rate of more than 0 Mbit/s")

    def rack_of(self, host: int) -> int:
        return next(r for r in range(len(self.racks)) if host < sum(self.racks[: r + 1]))


def goodput(mbit: float) -> float:
    """bytes/s of TCP's data on a link of `mbit` 10^6 bits/s."""
    return mbit * 1e6 / 8 * SEGMENT_BYTES / FRAME_BYTES


def data_address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def control_address(host: int) -> str:
    return f"10.78.0.{host + 2}"


class Namespace:
    """A network namespace without a name. It goes with this object and the processes in it."""

    def __init__(self) -> None:
        with _open_current() as before:
            _check(_libc.unshare(_CLONE_NEWNET), "make a network namespace")
            try:
                self.descriptor = os.open(_CURRENT, os.O_RDONLY | os.O_CLOEXEC)
            finally:
                _enter(before)

    @property
    def path(self) -> str:
        """The path by which other processes can name it while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread is in the namespace meanwhile, and so are the threads that it
        starts."""
        with _open_current() as before:
            _enter(self.descriptor)
            try:
                yield
            finally:
                _enter(before)

    def start(
        self,
        command: Sequence[str],
        *,
        stdout: int = subprocess.DEVNULL,
        stderr: int | None = None,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> "subprocess.Popen[str]":
        """Starts a process in the namespace. It dies with the thread that called this."""
        with self.entered():  # a started process inherits the thread's namespace
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                pass_fds=pass_fds,
                text=True,
                preexec_fn=die_with_parent(),  # noqa: PLW1509
            )

    def reset_connections(self) -> None:
        """Ends every TCP connection of the namespace. The other end gets RST: now, or if that does
        not reach it, when it next sends something."""
        with self.entered():
            subprocess.run(
                ["ss", "--kill", "--tcp", "state", "connected", "exclude", "time-wait"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
            )

    def close(self) -> None:
        os.close(self.descriptor)

    def _batch(self, tool: str, lines: Sequence[str]) -> None:
        with self.entered():
            done = subprocess.run(
                [tool, "-batch", "-"],
                input="\n".join(lines) + "\n",
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode:
            raise ConfigError(f"{tool} failed: {done.stderr.strip()}")


class Testbed:
    """Use as a context manager. `hub` and `hosts` are its namespaces."""

    __test__ = False  # keeps pytest from collecting it

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.hosts: list[Namespace] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """ConfigError if this user or this machine cannot have a testbed."""
        check_able()
        with ExitStack() as stack:
            self.hub = self._namespace(stack)
            for _ in range(self.wiring.hosts):
                self.hosts.append(self._namespace(stack))
            self._wire()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def cut(self, host: int) -> None:
        """Nothing comes to the host or from it any more, and nobody tells its peers."""
        self.hub._batch("ip", [f"link set {name}{host} down" for name in ("data", "control")])

    def join(self, host: int) -> None:
        """Undoes `cut`."""
        self.hub._batch("ip", [f"link set {name}{host} up" for name in ("data", "control")])

    def shape(self, host: int, mbit: float) -> None:
        """Gives the host's data link another rate, each way."""
        self.hub._batch("tc", [_shape(f"data{host}", mbit)])
        self.hosts[host]._batch("tc", [_shape("data", mbit)])

    def _namespace(self, stack: ExitStack) -> Namespace:
        made = Namespace()
        stack.callback(made.close)
        return made

    def _wire(self) -> None:
        wiring = self.wiring
        racks = range(len(wiring.racks))
        switches = ["core", "control", *(f"rack{rack}" for rack in racks)]
        links = ["link set lo up"]
        shapes: list[str] = []
        for switch in switches:
            links.append(f"link add {switch} type bridge forward_delay 0 mcast_snooping 0")
            links.append(f"link set {switch} up")
        links.append(f"addr add {CONTROL_GATE}/16 dev control")
        for rack in racks:
            up, down = f"up{rack}", f"down{rack}"
            links.append(f"link add {up} type veth peer name {down}")
            links.append(f"link set {up} master core up")
            links.append(f"link set {down} master rack{rack} up")
            shapes += [_shape(up, wiring.trunk_mbit), _shape(down, wiring.trunk_mbit)]
        for number, host in enumerate(self.hosts):
            switch = f"rack{wiring.rack_of(number)}" if wiring.racks else "core"
            for name, master in ("data", switch), ("control", "control"):
                port = f"{name}{number}"
                links.append(f"link add {port} type veth peer name {name} netns {host.path}")
                links.append(f"link set {port} master {master} up")
            shapes.append(_shape(f"data{number}", wiring.link_mbit))
        for namespace in (self.hub, *self.hosts):
            with namespace.entered():
                Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
        self.hub._batch("ip", links)
        self.hub._batch("tc", shapes)
        for number, host in enumerate(self.hosts):
            self._wire_host(number, host)

    def _wire_host(self, number: int, host: Namespace) -> None:
        host._batch(
            "ip",
            [
                "link set lo up",
                f"addr add {control_address(number)}/16 dev control",
                "link set control up",
                f"addr add {data_address(number)}/16 dev data noprefixroute",
                "link set data up",
                # Not every machine's default: another congestion control would pace by itself,
                # besides the shaper.
                "route add 10.77.0.0/16 dev data congctl cubic",
            ],
        )
        host._batch("tc", [_shape("data", self.wiring.link_mbit)])


def join(path: str) -> None:
    """Moves this thread for good into another process's namespace (`Namespace.path`)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    _enter(descriptor)
    os.close(descriptor)


def check_able() -> None:
    """ConfigError says what this user or this machine lacks."""
    if os.geteuid() != 0:
        raise ConfigError("a testbed of network namespaces needs root: run it with sudo")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not found: install iproute2")


_CURRENT = "/proc/thread-self/ns/net"


@contextmanager
def _open_current() -> Iterator[int]:
    descriptor = os.open(_CURRENT, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _enter(descriptor: int) -> None:
    _check(_libc.setns(descriptor, _CLONE_NEWNET), "enter a network namespace")


def _check(result: int, what: str) -> None:
    if result:
        raise ConfigError(f"cannot {what}: {os.strerror(ctypes.get_errno())}")


def _shape(device: str, mbit: float) -> str:
    bits = round(mbit * 1e6)
    return f"qdisc replace dev {device} root tbf rate {bits}bit burst {BURST} limit {QUEUE}"
