"""These tests need an RDMA device; `tests/rdma/test_machine.py` runs them in a machine with one.

On a machine that has a device: LS_RDMA_DEVICE=mlx5_0 LS_RDMA_GID_INDEX=3 pytest tests/rdma/guest
"""

import asyncio
import os
from collections.abc import Callable, Mapping

import uvloop

collect_ignore_glob = [] if "LS_RDMA_DEVICE" in os.environ else ["test_*.py"]


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that transports run on."""
    return {"uvloop": uvloop.new_event_loop}
