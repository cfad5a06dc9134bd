"""How long OpenMP's threads spin, in the processes of a node."""

import os
import subprocess
import sys

import pytest

from services.node.engine import kernels

SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
NODE, RANK = "services.node.real_parts", "services.node.engine.rank"


def spins(module: str, **settings: str) -> str:
    """What OpenMP says that it has read, in a new process which imports the module."""
    given = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    ended = subprocess.run(
        [sys.executable, "-c", f"import services.node.service, {module}"],
        env={**given, "OMP_DISPLAY_ENV": "verbose", **settings},
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    (line,) = (line for line in ended.stderr.splitlines() if "GOMP_SPINCOUNT" in line)
    return line.partition("=")[2].strip(" '")


@pytest.mark.skipif(kernels._openmp() is None, reason="torch's OpenMP is not GNU's here")
@pytest.mark.parametrize("module", [NODE, RANK])
def test_threads_that_wait_soon_sleep(module: str) -> None:
    assert spins(module) == "1000"


@pytest.mark.skipif(kernels._openmp() is None, reason="torch's OpenMP is not GNU's here")
def test_what_the_operator_says_about_it_holds() -> None:
    assert spins(NODE, GOMP_SPINCOUNT="77") == "77"
    assert int(spins(NODE, OMP_WAIT_POLICY="active")) > 10**6
