import pytest

from shared.bus.delivery import MAX_PAYLOAD
from shared.bus.nats_ends import check_payload, check_version
from shared.errors import BusError


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0-RC.3", "v2.15.1", "2.100.0", "3.0.0"])
def test_servers_that_will_do(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["2.9.10", "2.10.29", "1.99.0", "", "unknown"])
def test_servers_that_will_not(version: str) -> None:
    with pytest.raises(BusError, match=r"too old.*2\.11"):
        check_version(version)


def test_a_server_must_take_what_is_sent() -> None:
    check_payload(MAX_PAYLOAD)
    with pytest.raises(BusError, match=f"1048576 bytes at most: set max_payload: {MAX_PAYLOAD}"):
        check_payload(1 << 20)
