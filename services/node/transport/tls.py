"""TLS 1.3 between nodes: each shows a certificate of the cluster's own authority, and asks for one.

Whoever has such a certificate is a node, the one that its common name says (`node ID`). Host names
are not checked, since nodes are known by address. Where OpenSSL and the kernel support kernel TLS,
the kernel encrypts.
"""

import socket
import ssl
from dataclasses import dataclass
from typing import Any

from shared.errors import ConfigError

_ENABLE_KTLS = 1 << 3
"""SSL_OP_ENABLE_KTLS, which the ssl module names only from Python 3.12 on."""


OF_NODE = "node "
"""What a certificate's common name begins with, before the node's id."""


@dataclass(frozen=True, slots=True)
class Tls:
    dialling: ssl.SSLContext
    listening: ssl.SSLContext


def certified(sock: socket.socket) -> str | None:
    """Which node the peer is by its certificate; None: the connection has no TLS. Empty: its
    certificate says no node."""
    if not isinstance(sock, ssl.SSLSocket):
        return None
    subject: Any = (sock.getpeercert() or {}).get("subject", ())
    names = [value for part in subject for key, value in part if key == "commonName"]
    name = str(names[0]) if len(names) == 1 else ""
    return name.removeprefix(OF_NODE) if name.startswith(OF_NODE) else ""


def load(certificate: str, key: str, authority: str) -> Tls | None:
    """Reads the PEM files of `node.tls_certificate`, `tls_key` and `tls_authority`; None if all
    three are empty.

    ConfigError: one of them is missing or cannot be used.
    """
    files = {"tls_certificate": certificate, "tls_key": key, "tls_authority": authority}
    if not any(files.values()):
        return None
    if missing := [f"node.{name}" for name, path in files.items() if not path]:
        raise ConfigError(f"TLS between nodes needs {', '.join(missing)} too")
    contexts = []
    for purpose in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        context = ssl.SSLContext(purpose)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.options |= _ENABLE_KTLS
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(certificate, key)
            context.load_verify_locations(authority)
        except OSError as error:  # ssl.SSLError is an OSError
            raise ConfigError(
                f"TLS between nodes: {certificate}, {key} and {authority} cannot be used: {error}"
            ) from error
        contexts.append(context)
    return Tls(*contexts)
