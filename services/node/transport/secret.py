"""How nodes prove to each other that they are of one cluster: each knows its secret.

The proof is a MAC (HMAC-SHA256) over a number that the other end has just drawn, and over all that
this end says of itself. So a proof that was seen before is worth nothing. It says who may connect,
but does not protect what follows from others on the network path: that takes TLS (tls.py).
"""

import hashlib
import hmac
import os
import stat
from pathlib import Path

from shared.errors import ConfigError

NONCE_BYTES = 32
LEAST_BYTES = 32
"""A shorter secret is refused."""
DIALLER, LISTENER = b"lambdascale data plane, dialler", b"lambdascale data plane, listener"
"""A proof of one end is none of the other, so that nobody can send it back."""


class Secret:
    def __init__(self, key: bytes) -> None:
        self._key = key

    def proof(self, end: bytes, *said: bytes) -> bytes:
        """`end`: DIALLER or LISTENER. `said`: the numbers that were drawn, and what this end says
        of itself."""
        mac = hmac.new(self._key, end, hashlib.sha256)
        for part in said:
            mac.update(len(part).to_bytes(4) + part)
        return mac.digest()

    def proves(self, proof: bytes, end: bytes, *said: bytes) -> bool:
        return hmac.compare_digest(proof, self.proof(end, *said))


def load(path: str) -> Secret | None:
    """Reads the file of `node.secret_file`. None: no file is configured.

    ConfigError: it cannot be read, others may read it, or it is too short.
    """
    if not path:
        return None
    try:
        with Path(path).open("rb") as file:
            others = os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO)
            key = file.read().strip()
    except OSError as error:
        raise ConfigError(f"node.secret_file: {path}: {error.strerror}") from error
    if others:
        raise ConfigError(
            f"node.secret_file: other users may read or change {path}: chmod 600 {path}"
        )
    if len(key) < LEAST_BYTES:
        raise ConfigError(
            f"node.secret_file: {path} has {len(key)} bytes, at least {LEAST_BYTES} are needed: "
            f"openssl rand -hex 32 > {path}"
        )
    return Secret(key)
