"""Which requests of browsers are answered.

A page of any site can make its visitor's browser send requests to a gateway that the visitor's
machine reaches, and without API keys nothing else would stop them. So a request from a page of
another origin is refused unless `gateway.cors_origins` names that origin. A page can also bring its
own host name to point to the gateway's address (DNS rebinding), which makes the origins equal. So a
gateway that listens on loopback answers only to names that cannot be such a page's.
"""

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from services.gateway.api_error import ApiError
from shared.config import GatewayConfig

ANY = "*"
PREFLIGHT_S = "600"
"""How long a browser may remember what a preflight request was answered."""
_METHODS = "GET, POST"
_EXPOSED = "Retry-After, X-Request-ID"


@dataclass(frozen=True, slots=True)
class Browsers:
    hosts: frozenset[str] | None
    """Names by which the gateway is called, beside addresses; None: by all."""
    origins: frozenset[str]
    """Origins whose pages may call the gateway, beside its own."""

    def check(self, headers: Mapping[str, str]) -> None:
        """ApiError 421 if the request is for a host that is not this one, 403 if it comes from a
        page of an origin that is not allowed."""
        host = headers.get("Host", "")
        if self.hosts is not None and not _is_ours(host, self.hosts):
            raise ApiError(
                421,
                f"this gateway is not called {host!r}; name the host in gateway.hosts if it is",
                code="unknown_host",
            )
        origin = headers.get("Origin")
        if origin is not None and not self._allows(origin, host):
            raise ApiError(
                403,
                f"pages of {origin!r} may not call this gateway; name the origin in "
                "gateway.cors_origins if they may",
                code="origin_not_allowed",
            )

    def answer(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Headers that let the page that sent a checked request read the answer."""
        origin = headers.get("Origin")
        if origin is None:
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": _EXPOSED,
            "Vary": "Origin",
        }

    def preflight(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The answer to a browser that asks, before a checked request, whether it may send it."""
        asked = headers.get("Access-Control-Request-Headers", "")
        return {
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Max-Age": PREFLIGHT_S,
            **({"Access-Control-Allow-Headers": asked} if asked else {}),
        }

    def _allows(self, origin: str, host: str) -> bool:
        if ANY in self.origins or origin.lower() in self.origins:
            return True
        page, own = _split(origin), _split(f"//{host}")
        if page is None or own is None or page.hostname is None:
            return False  # such as "null", the origin of a file or of a sandboxed frame
        default = 443 if page.scheme == "https" else 80
        return (page.hostname, page.port or default) == (own.hostname, own.port or default)


def browsers(config: GatewayConfig) -> Browsers:
    hosts: frozenset[str] | None = None
    if config.hosts or _is_loopback(config.host):
        hosts = frozenset(
            name.lower() for name in (*config.hosts, config.host, "localhost", socket.gethostname())
        )
    return Browsers(hosts, frozenset(origin.lower() for origin in config.cors_origins))


def _is_ours(host: str, names: frozenset[str]) -> bool:
    parts = _split(f"//{host}")
    if parts is None:
        return False
    name = parts.hostname or ""
    return name in names or name.endswith(".localhost") or _is_address(name)


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # which may not be a number
    except ValueError:
        return None
    return parts


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
