"""The fork servers of a test run's process: torch is imported once for all real clusters, and once
for all ranks."""

import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from services.local.forking import fork_server
from services.node.engine.rank_server import SERVER
from shared.forking import ForkServer

_LOG = "fork-server.log"


@cache
def server() -> ForkServer:
    """The server from which the services of clusters are forked."""
    return fork_server(_directory() / _LOG, os.environ)


def stop() -> None:
    """Ends the servers that were used."""
    SERVER.stop()
    if server.cache_info().currsize:
        server().stop()
        shutil.rmtree(_directory())


@cache
def _directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="lambdascale-tests-"))
