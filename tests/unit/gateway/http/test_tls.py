"""HTTPS."""

import ssl
from pathlib import Path

import aiohttp
import pytest

from services.gateway.tls import load_tls
from shared.config import GatewayConfig
from shared.errors import ConfigError
from tests.support import tls
from tests.unit.gateway.http.builders import ASK, post
from tests.unit.gateway.support import replica, running

FILES = Path(tls.__file__).parent
CERTIFICATE, KEY = str(FILES / "ours-node.pem"), str(FILES / "ours-node.key")


async def test_with_a_certificate_the_api_is_https() -> None:
    client = ssl.create_default_context(cafile=str(FILES / "ours-authority.pem"))
    client.check_hostname = False
    config = GatewayConfig(port=0, tls_certificate=CERTIFICATE, tls_key=KEY)
    async with running(replica(1), config=config) as cluster:
        url = cluster.service.url
        assert url.startswith("https://")
        connector = aiohttp.TCPConnector(ssl=client)
        async with aiohttp.ClientSession(url, connector=connector) as http:
            status, _ = await post(http, ASK)
            assert status == 200
        plain = url.replace("https://", "http://")
        async with aiohttp.ClientSession(plain) as http:
            with pytest.raises(aiohttp.ClientError):
                await post(http, ASK)


@pytest.mark.parametrize(
    ("certificate", "key", "said"),
    [
        (CERTIFICATE, "", r"HTTPS needs gateway\.tls_key too"),
        ("", KEY, r"HTTPS needs gateway\.tls_certificate too"),
        (CERTIFICATE, str(FILES / "others-node.key"), "cannot be used"),
        (CERTIFICATE, "/nowhere", "cannot be used"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(certificate: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_tls(certificate, key)
