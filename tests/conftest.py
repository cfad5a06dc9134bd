"""Fixtures of several test packages: virtual time, buses, a real nats-server to run them on.

Nothing here imports torch: the tests of the pure cores do not need it, and it takes seconds.
"""

import asyncio
import gc
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

import services.node.engine  # noqa: F401 - before the oracle's torch multiplies anything
from services.local.nats_server import NatsServer
from shared import clock, telemetry
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.nats import NatsBus
from shared.config import BusConfig
from simulation.loop import VirtualLoop, reproducible
from tests.support import amounts, dealing, forks, tracebacks
from tests.support.leftovers import Leftovers

VIRTUAL_LIMIT_S = 86_400.0
"""Virtual time after which a test in it is taken to wait for what never comes."""


def _torch_has_a_gpu() -> bool:
    """What torch.cuda.is_available() says: a build of torch for CUDA, a driver and a device."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    if not Path(torch.origin).with_name("lib").joinpath("libtorch_cuda.so").exists():
        return False
    # Asked in another process: one that has initialized CUDA must not fork.
    asks = "import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    asked = subprocess.run([sys.executable, "-c", asks], stderr=subprocess.DEVNULL, check=False)
    return asked.returncode == 0


# Threads that wait for each other must not spin where other tests want the processors; and they
# are equally many on every machine, in the processes that tests start too.
os.environ["GOMP_SPINCOUNT"] = "0"
os.environ.setdefault("OMP_NUM_THREADS", "2")
# torch.cuda.is_available() asks the driver's library for monitoring, and does not initialize CUDA:
# the processes that run the tests are forks of the one that imports them.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

if not _torch_has_a_gpu():  # Triton's interpreter, chosen before anything imports Triton
    os.environ["TRITON_INTERPRET"] = "1"


def log_plainly() -> None:
    """Tests that inject errors log many, and a traceback that shows every variable takes a
    second."""
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.reset_defaults()
    structlog.configure(processors=[structlog.processors.add_log_level, plain])


log_plainly()

# Tests measure no time: a busy machine must not fail them.
settings.register_profile(
    "usual",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=amounts.examples(40),
)
settings.load_profile("usual")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # Collecting tests makes modules, which stay: no need to look through them.
    config.pluginmanager.register(Leftovers())


def pytest_sessionfinish() -> None:
    forks.stop()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    dealing.in_order(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Refuses a test that leaves its clock to the tests after it, and takes back how commands and
    services that ran in this process have set up their logs and traces."""
    yield
    telemetry.shutdown()
    log_plainly()
    assert clock.wall_source is time.time_ns, "the test has replaced the wall clock and left it so"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.excinfo:
        tracebacks.give_lines(call.excinfo.value)
        call.excinfo = pytest.ExceptionInfo.from_exception(call.excinfo.value)
    return (yield)


class VirtualTime(VirtualLoop):
    """The loop of one test. While it is open, ids, chance and the wall clock follow from it."""

    def __init__(self) -> None:
        super().__init__(limit_s=VIRTUAL_LIMIT_S)
        self._reproducible = reproducible(self, seed=0)
        self._reproducible.__enter__()

    def close(self) -> None:
        if not self.is_closed():
            self._reproducible.__exit__(None, None, None)
        super().close()


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """A test marked `virtual_time` and its async fixtures run in virtual time.

    `asyncio.sleep`, timeouts and `shared.clock.now()` then cost nothing: the clock jumps to the
    next timer once nobody has work to do, so a test waits for the real constants of a service
    instead of shortened ones, and a busy machine cannot make it late. Use it with buses in memory:
    the loop refuses sockets, and runs what is meant for a thread at once. A test that would wait
    for ever fails with `Stalled`, which names who waits. Mark a whole module by
    `pytestmark = pytest.mark.virtual_time`.
    """
    if item.get_closest_marker("virtual_time"):
        return {"virtual time": VirtualTime}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A nats-server of this test alone, on a free port (it is up in some 15 ms)."""
    async with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def nats_bus(nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    async with NatsBus(BusConfig(url=nats_server.url), "test") as bus:
        yield bus


@pytest.fixture
async def memory_bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBus(MemoryBroker(), "test") as bus:
        yield bus
