"""Read capabilities: what lets a node read blocks of a model from other nodes.

Whoever orders a copy signs one (Ed25519): the planner for a scaling event, the registry for the
copies that it keeps. It says which node may read which blocks of which model, and until when. It
goes with the order to the node that reads, which shows it to the nodes that it reads from. These
know the public keys, so they ask nobody.

Times are of the wall clock. A node takes a capability for TOLERANCE_S longer than it says, because
its clock may differ from the signer's by so much.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shared.bus.credentials import read_secret
from shared.errors import ConfigError, ReadRefused
from shared.ids import ModelId, NodeId

LIFETIME_S = 3600.0
"""How long an order to copy holds. A copy that takes longer at its rate gets that time as well."""
TOLERANCE_S = 300.0
KEY_BYTES = 32
MAX_BYTES = 64 << 10
"""A longer capability is refused unread."""
_PURPOSE = b"lambdascale read capability 1\0"
"""Signed in front of the claims, so that no other signature by the same key is a capability."""


class Claims(msgspec.Struct, frozen=True, array_like=True):
    signer: str
    """The role whose key signed it."""
    reader: NodeId
    model: ModelId
    blocks: tuple[tuple[int, int], ...]
    """Ranges (first, behind the last), which do not touch."""
    until_ns: int

    def cover(self, block: int) -> bool:
        return any(first <= block < stop for first, stop in self.blocks)


class _Signed(msgspec.Struct, frozen=True, array_like=True):
    claims: bytes
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


_claims_decoder = msgspec.msgpack.Decoder(Claims)
_signed_decoder = msgspec.msgpack.Decoder(_Signed)


class Signer:
    """A role's private key."""

    def __init__(self, role: str, seed: bytes) -> None:
        self._role = role
        self._key = Ed25519PrivateKey.from_private_bytes(seed)

    @property
    def public_half(self) -> str:
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, reader: NodeId, model: ModelId, blocks: Iterable[int], until_ns: int) -> bytes:
        claims = msgspec.msgpack.encode(Claims(self._role, reader, model, ranges(blocks), until_ns))
        return msgspec.msgpack.encode(_Signed(claims, self._key.sign(_PURPOSE + claims)))


class Signers:
    """The public keys of the roles that sign."""

    def __init__(self, keys: dict[str, str]) -> None:
        """`keys`: in hex, by role. ValueError: one of them is no key."""
        self._keys = {
            role: Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
            for role, key in keys.items()
        }

    def claims_of(self, capability: bytes) -> Claims:
        """What it says, if one of our roles has signed it; else ReadRefused."""
        if len(capability) > MAX_BYTES:
            raise ReadRefused(f"a capability of {len(capability)} bytes, at most {MAX_BYTES}")
        try:
            signed = _signed_decoder.decode(capability)
            claims = _claims_decoder.decode(signed.claims)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ReadRefused(f"malformed capability: {error}") from None
        key = self._keys.get(claims.signer)
        if key is None:
            known = ", ".join(self._keys)
            raise ReadRefused(f"a capability by {claims.signer!r}; node.signers_file has {known}")
        try:
            key.verify(signed.signature, _PURPOSE + signed.claims)
        except InvalidSignature:
            raise ReadRefused(
                f"a capability that no {claims.signer} of this cluster has signed: "
                "is node.signers_file up to date?"
            ) from None
        return claims


def ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Runs of numbers, each as (first, behind the last)."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return tuple(found)


def new_seed() -> bytes:
    return os.urandom(KEY_BYTES)


def load_signer(role: str, path: str) -> Signer | None:
    """Reads the role's `signing_key_file`. None: no file is configured. ConfigError."""
    if not path:
        return None
    setting = f"{role}.signing_key_file"
    try:
        return Signer(role, bytes.fromhex(read_secret(Path(path), setting)))
    except ValueError as error:
        raise ConfigError(
            f"{setting}: {path} holds no key: `lambdascale init` makes one"
        ) from error


def load_signers(path: str) -> Signers | None:
    """Reads `node.signers_file`. None: no file is configured. ConfigError."""
    if not path:
        return None
    text = read_secret(Path(path), "node.signers_file")
    try:
        return Signers(msgspec.json.decode(text, type=dict[str, str]))
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(
            f"node.signers_file: {path} holds no keys ({error}): `lambdascale init` makes it"
        ) from error
