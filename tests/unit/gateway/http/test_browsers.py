"""Requests of browsers: for which hosts, from which origins."""

import aiohttp
import pytest

from services.gateway.api_error import ApiError
from services.gateway.browsers import Browsers, browsers
from shared.config import GatewayConfig
from tests.unit.gateway.http.builders import ASK
from tests.unit.gateway.support import Cluster, replica, running

HERE = "127.0.0.1:8000"
PAGE = "https://chat.example.org"


def refusal(guard: Browsers, **headers: str) -> int:
    try:
        guard.check(headers)
    except ApiError as error:
        return error.status
    return 0


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (HERE, 0),
        ("localhost", 0),
        ("LOCALHOST:8000", 0),
        ("demo.localhost:8000", 0),
        ("[::1]:8000", 0),
        ("10.0.0.1", 0),
        ("evil.example:8000", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("[::1", 421),
        ("localhost:port", 421),
        ("", 421),
    ],
)
def test_on_loopback_other_hosts_are_refused(host: str, status: int) -> None:
    assert refusal(browsers(GatewayConfig()), Host=host) == status


def test_elsewhere_all_hosts_are_answered_unless_they_are_named() -> None:
    assert refusal(browsers(GatewayConfig(host="0.0.0.0")), Host="llm.example.org") == 0
    named = browsers(GatewayConfig(host="0.0.0.0", hosts=("LLM.example.org",)))
    assert refusal(named, Host="llm.example.org:80") == 0
    assert refusal(named, Host="evil.example") == 421


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (f"http://{HERE}", 0),
        ("http://127.0.0.1:8001", 403),
        ("http://127.0.0.1", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("http://[", 403),
        ("http://127.0.0.1:x", 403),
    ],
)
def test_pages_of_other_origins_are_refused(origin: str, status: int) -> None:
    assert refusal(browsers(GatewayConfig()), Host=HERE, Origin=origin) == status


def test_ports_that_go_without_saying() -> None:
    guard = browsers(GatewayConfig())
    assert refusal(guard, Host="localhost", Origin="http://localhost:80") == 0
    assert refusal(guard, Host="localhost", Origin="http://localhost") == 0
    assert refusal(guard, Host="localhost:443", Origin="https://localhost") == 0


def test_origins_that_are_named_may_call() -> None:
    guard = browsers(GatewayConfig(cors_origins=(PAGE,)))
    assert refusal(guard, Host=HERE, Origin=PAGE.upper()) == 0
    assert refusal(guard, Host=HERE, Origin="https://example.org") == 403
    every = browsers(GatewayConfig(cors_origins=("*",)))
    assert refusal(every, Host=HERE, Origin="null") == 0


async def test_a_page_of_another_origin_starts_nothing(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    headers = {"Origin": "http://evil.example"}
    async with http.post("/v1/completions", json=ASK, headers=headers) as response:
        assert response.status == 403
        assert "gateway.cors_origins" in (await response.json())["error"]["message"]
        assert "Access-Control-Allow-Origin" not in response.headers
    async with http.get("/metrics", headers={"Host": "evil.example"}) as response:
        assert response.status == 421


async def test_a_page_that_may_call_reads_answers_and_streams() -> None:
    config = GatewayConfig(port=0, cors_origins=(PAGE,))
    asks = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with (
        running(replica(1), config=config) as cluster,
        aiohttp.ClientSession(cluster.service.url) as http,
    ):
        async with http.options("/v1/completions", headers=asks) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
        for stream in (False, True):
            body = {**ASK, "stream": stream}
            async with http.post(
                "/v1/completions", json=body, headers={"Origin": PAGE}
            ) as response:
                assert response.status == 200
                assert response.headers["Access-Control-Allow-Origin"] == PAGE
                assert response.headers["Vary"] == "Origin"
