"""What the services of a local cluster are forked from."""

from collections.abc import Mapping
from pathlib import Path

from shared.forking import ForkServer

PROGRAM = "services.cli.main"
"""The module whose `main` is `lambdascale WORDS`."""
MODULES = (
    PROGRAM,
    *(f"services.{role}.service" for role in ("gateway", "planner", "registry", "node")),
    "services.node.real_parts",
)


def fork_server(log: Path, environment: Mapping[str, str]) -> ForkServer:
    """See ForkServer."""
    return ForkServer("services", MODULES, log, environment)
