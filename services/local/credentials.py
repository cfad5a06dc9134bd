"""The users of a cluster's bus: a directory for each, with the secret half of its key.

    authority/users.json    the public halves, by directory: who may connect
    registry/nats.seed      one role's secret half; also planner/, gateway/, operator/
    registry/signing.key    signs what nodes may read of each other; also planner/
    authority/signers.json  the public halves of these, by role
    nodes/ID/nats.seed      a node's
    nodes/ID/nodes.secret   what all nodes know, and show each other
    nodes/ID/signers.json   as in authority/

A machine needs the directories of what runs there, and no other. What there is already stays.
"""

import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import nkeys

from services.local.private import private_directory, write_private
from shared.bus.credentials import SEED, public_half, read_credentials
from shared.capabilities import load_signer, new_seed
from shared.errors import ConfigError
from shared.ids import NodeId, check_name
from shared.permissions import ANSWER_WITHIN, Role, inbox_of, permissions

AUTHORITY = "authority"
USERS = "users.json"
NODES = "nodes"
NODES_SECRET = "nodes.secret"
SIGN = (Role.PLANNER, Role.REGISTRY)
"""Who orders copies, and signs what nodes may read for them."""
SIGNING_KEY = "signing.key"
SIGNERS = "signers.json"


@dataclass(frozen=True, slots=True)
class User:
    role: Role
    node: NodeId | None = None
    """Which node it is, if it is one."""

    @property
    def directory(self) -> str:
        return f"{NODES}/{self.node}" if self.node else str(self.role)

    @classmethod
    def of_directory(cls, name: str) -> Self:
        """ConfigError: no user's directory is called so."""
        node = name.removeprefix(f"{NODES}/")
        try:
            if node != name:
                return cls(Role.NODE, NodeId(check_name("node", node)))
            return cls(Role(name))
        except ValueError as error:
            raise ConfigError(f"there is no user {name!r}") from error


OPERATOR = User(Role.OPERATOR)
Keys = dict[User, str]
"""The public half of each user's key."""


def all_users(nodes: Iterable[NodeId]) -> list[User]:
    """A user for each role, and for each of the nodes."""
    roles = [User(role) for role in Role if role is not Role.NODE]
    return [*roles, *(User(Role.NODE, node) for node in nodes)]


def make_users(directory: Path, users: Collection[User]) -> Keys:
    """Makes a key for each of the users that has none yet, and returns the keys of all that the
    directory knows. ConfigError if what is there cannot be used."""
    for needed in (directory, directory / NODES):
        private_directory(needed)
    keys = read_users(directory)
    secret = shared_secret(directory, NODES_SECRET)
    for user in users:
        private = directory / user.directory
        if user in keys:
            continue
        if (private / SEED).exists():
            keys[user] = read_credentials(private).key
            continue
        seed = bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)).decode()
        private_directory(private)
        if user.node:
            write_private(private / NODES_SECRET, secret)
        write_private(private / SEED, seed + "\n")
        keys[user] = public_half(seed)
    write_users(directory, keys)
    _make_signers(directory, keys)
    return keys


def _make_signers(directory: Path, users: Collection[User]) -> None:
    """Makes a signing key for each role that has none yet, and tells the nodes' directories."""
    public = _read_signers(directory)
    for role in SIGN:
        if role in public or User(role) not in users:
            continue
        path = directory / role / SIGNING_KEY
        if not path.exists():
            private_directory(path.parent)
            write_private(path, new_seed().hex() + "\n")
        signer = load_signer(role, str(path))
        assert signer is not None  # a path was given
        public[role] = signer.public_half
    text = _json(public)
    own = (directory / user.directory for user in users if user.node)
    for known in (directory / AUTHORITY, *(each for each in own if each.is_dir())):
        if not (known / SIGNERS).exists() or (known / SIGNERS).read_text() != text:
            write_private(known / SIGNERS, text)


def _read_signers(directory: Path) -> dict[str, str]:
    path = directory / AUTHORITY / SIGNERS
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def read_users(directory: Path) -> Keys:
    """Whoever has a key so far. ConfigError if the file is damaged."""
    path = directory / AUTHORITY / USERS
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    return {User.of_directory(name): key for name, key in found.items()}


def write_users(directory: Path, keys: Keys) -> None:
    private_directory(directory / AUTHORITY)
    text = _json({user.directory: key for user, key in keys.items()})
    write_private(directory / AUTHORITY / USERS, text)


def _json(keys: dict[str, str]) -> str:
    return json.dumps(keys, indent=2, sort_keys=True) + "\n"


def shared_secret(directory: Path, name: str) -> str:
    """What several machines know, and show each other; drawn if it is not there."""
    path = directory / AUTHORITY / name
    if not path.exists():
        private_directory(path.parent)
        write_private(path, secrets.token_hex(32) + "\n")
    return path.read_text()


def forget(directory: Path, user: User) -> None:
    """Takes the user's key: it may connect no longer, once the nats-servers have heard of it."""
    keys = read_users(directory)
    keys.pop(user, None)
    write_users(directory, keys)
    shutil.rmtree(directory / user.directory, ignore_errors=True)
    signers = _read_signers(directory)
    if signers.pop(user.role, None):
        write_private(directory / AUTHORITY / SIGNERS, _json(signers))


def authorization(keys: Keys) -> dict[str, object]:
    """What a nats-server's configuration says of who may connect, and may do what then."""
    by_name = sorted(keys, key=lambda user: user.directory)
    return {"users": [_entry(user, keys[user]) for user in by_name]}


def _entry(user: User, key: str) -> dict[str, object]:
    may = permissions(user.role, user.node, inbox_of(key))
    granted: dict[str, object] = {
        "publish": {"allow": list(may.publish)},
        "subscribe": {"allow": list(may.subscribe)},
    }
    if may.answers:
        granted["allow_responses"] = {"max": 1, "expires": ANSWER_WITHIN}
    return {"nkey": key, "permissions": granted}
