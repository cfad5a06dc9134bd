"""The image that virtual machines with RDMA boot, made once; without it these tests are skipped."""

import compileall

import pytest

from services.node.transport import native
from tests.rdma.image import Image, prepare
from tests.rdma.machine import REPOSITORY
from tests.support.packages import Unavailable


@pytest.fixture(scope="session")
def image() -> Image:
    # Here, because guests only read this machine's files, and their processors are slow.
    for package in ("services", "shared", "simulation", "tests"):
        compileall.compile_dir(REPOSITORY / package, quiet=1)
    native.load()
    try:
        return prepare()
    except Unavailable as error:
        pytest.skip(f"no virtual machine with RDMA: {error}")
