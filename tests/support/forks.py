"""The fork server of all real clusters of a test run's process: torch is imported once for them."""

import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from services.local.forking import fork_server
from shared.forking import ForkServer

_LOG = "fork-server.log"


@cache
def server() -> ForkServer:
    return fork_server(_directory() / _LOG, os.environ)


def stop() -> None:
    """Ends the server, if any cluster has used it."""
    if server.cache_info().currsize:
        server().stop()
        shutil.rmtree(_directory())


@cache
def _directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="lambdascale-tests-"))
