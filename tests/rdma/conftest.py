"""The image that virtual machines with RDMA boot, made once; without it these tests are skipped."""

import compileall

import pytest

from tests.rdma.image import Image, prepare
from tests.rdma.machine import REPOSITORY
from tests.support.packages import Unavailable


@pytest.fixture(scope="session")
def image() -> Image:
    for package in ("services", "shared", "simulation", "tests"):  # which guests only read
        compileall.compile_dir(REPOSITORY / package, quiet=1)
    try:
        return prepare()
    except Unavailable as error:
        pytest.skip(f"no virtual machine with RDMA: {error}")
