"""What a service is told about its configuration before it runs."""

import resource

import pytest

from services.cli.run_service import buses_elsewhere, raise_open_files
from shared.config import BusConfig, Config, NodeConfig


@pytest.mark.parametrize(
    ("url", "host", "elsewhere"),
    [
        ("nats://127.0.0.1:4222", "127.0.0.1", []),
        ("nats://localhost:4222", "127.0.0.1", []),
        ("nats://nats:4222", "127.0.0.1", ["nats"]),
        ("nats://a:secret@10.0.0.1:4222,nats://127.0.0.1:4222", "localhost", ["10.0.0.1"]),
        ("nats://nats:4222", "node-0", []),
    ],
)
def test_a_node_that_others_cannot_reach_is_found_out(
    url: str, host: str, elsewhere: list[str]
) -> None:
    config = Config(bus=BusConfig(url=url), node=NodeConfig(host=host))
    assert buses_elsewhere(config) == elsewhere


def test_the_soft_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
