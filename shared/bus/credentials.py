"""A user's credentials for NATS: an nkey, whose secret half never leaves its file's machine.

`lambdascale init` makes a directory for each user (`services/local/credentials.py`), and
`bus.credentials` names the directory of the user that a process is.
"""

import stat
from dataclasses import dataclass, field
from pathlib import Path

import nkeys

from shared.errors import ConfigError

SEED = "nats.seed"
"""The file with the secret half of the key."""


@dataclass(frozen=True, slots=True)
class Credentials:
    seed: str = field(repr=False)
    key: str
    """The public half, by which NATS knows the user."""


def read_credentials(directory: Path) -> Credentials:
    """ConfigError: there are none, they are no key, or others of this machine may read them."""
    path = directory / SEED
    seed = read_secret(path, "bus.credentials")
    try:
        return Credentials(seed, public_half(seed))
    except (nkeys.NkeysError, ValueError) as error:
        raise ConfigError(
            f"bus.credentials: {path} holds no nkey: `lambdascale init` makes one"
        ) from error


def public_half(seed: str) -> str:
    """Of the key with this seed. NkeysError or ValueError if it is none."""
    return bytes(nkeys.from_seed(bytearray(seed.encode())).public_key).decode()


def read_secret(path: Path, setting: str) -> str:
    """The file's text. ConfigError, which names the setting, if it cannot be read, or can be by
    others than its owner."""
    try:
        mode = path.stat().st_mode
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"{setting}: {path} cannot be read ({why}): `lambdascale init` makes it"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{setting}: other users may read or change {path}: chmod 600 {path}")
    return text
