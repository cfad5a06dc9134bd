"""The image that the virtual machine with RDMA boots, made once; without it tests are skipped."""

import compileall

import pytest

from services.node.transport import native
from tests.rdma.image import Image, prepare
from tests.rdma.machine import REPOSITORY
from tests.support.packages import Unavailable


@pytest.fixture(scope="session")
def image() -> Image:
    # Here, because the guest only reads this machine's files, and its processor is slow.
    for package in ("services", "shared", "simulation", "tests"):
        compileall.compile_dir(REPOSITORY / package, quiet=1)
    native.load()
    try:
        return prepare()
    except Unavailable as error:
        pytest.skip(f"no virtual machine with RDMA: {error}")
