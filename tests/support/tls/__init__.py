"""Certificates for tests (README.md says how they were made)."""

from pathlib import Path

from services.node.transport.tls import Tls, load

DIRECTORY = Path(__file__).parent


def certificates(shown: str = "ours", trusted: str = "ours") -> Tls:
    """The settings of a node that shows the certificate of one authority and trusts another."""
    tls = load(
        str(DIRECTORY / f"{shown}-node.pem"),
        str(DIRECTORY / f"{shown}-node.key"),
        str(DIRECTORY / f"{trusted}-authority.pem"),
    )
    assert tls is not None
    return tls
