"""Connections that have said nothing yet that shows that they are of this cluster.

Anybody can make such connections, and keep silent. So only some may wait at a time. If one more
comes, the oldest goes of the address that has the most: a peer that begins its handshake at once is
let in, however many silent strangers there are.
"""

import ipaddress

from services.node.transport.connection import Connection

MOST = 512
"""The most that wait at a time."""
_PREFIX = 64
"""One customer's IPv6 addresses have these first bits in common."""


class Strangers:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._waiting: dict[str, dict[Connection, None]] = {}
        """By address; each in the order of arrival."""
        self._count = 0

    def enter(self, host: str, connection: Connection) -> Connection | None:
        """Returns the connection that has to go for this one, if one has to."""
        expelled = None
        if self._count == self._most:
            most = max(self._waiting, key=lambda address: len(self._waiting[address]))
            expelled = next(iter(self._waiting[most]))
            self._take(most, expelled)
        self._waiting.setdefault(_network(host), {})[connection] = None
        self._count += 1
        return expelled

    def leave(self, host: str, connection: Connection) -> None:
        """Its handshake is over, well or not. It may have been expelled before."""
        address = _network(host)
        if connection in self._waiting.get(address, {}):
            self._take(address, connection)

    def _take(self, address: str, connection: Connection) -> None:
        del self._waiting[address][connection]
        self._count -= 1
        if not self._waiting[address]:
            del self._waiting[address]


def _network(host: str) -> str:
    """What counts as one address."""
    if ":" not in host:
        return host
    return str(ipaddress.IPv6Network((host.partition("%")[0], _PREFIX), strict=False))
