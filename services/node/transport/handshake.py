"""The handshake of a TCP connection, at both ends."""

import asyncio
import secrets
import socket
from urllib.parse import urlsplit

import msgspec

from services.node.transport.connection import Connection
from services.node.transport.secret import DIALLER, LISTENER, NONCE_BYTES, Secret
from services.node.transport.sockets import DEEP, give_up_after, keep_alive, set_buffer
from services.node.transport.tls import Tls
from services.node.transport.wire import (
    Hello,
    Purpose,
    encode_challenge,
    encode_hello,
    unproved,
)
from shared.errors import BadInput, ConfigError, PeerLost, ProtocolViolation

SHALLOW = 64 * 1024
"""Receive buffer of a connection for reads on a paced link. It is small so that a busy receiver
holds its senders back."""
HANDSHAKE_S = 6.0
"""Seconds that a handshake may take. The kernel says within SILENCE_S whether the peer's host is
there; its process may have to wait for a processor, as when many start on one machine."""


class Handshake:
    """Makes connections, and welcomes those of others, in the name of one transport."""

    def __init__(
        self,
        host: str,
        port: int,
        tls: Tls | None,
        secret: Secret | None,
        *,
        paced: bool,
        silence_s: float,
        handshake_s: float,
        max_payload: int,
        asks: bool,
    ) -> None:
        """`asks`: whether readers have to show permits."""
        self._asks = asks
        self._host, self._port = host, port
        self._tls = tls
        self._secret = secret
        self._paced = paced
        self._silence_s = silence_s
        self._handshake_s = handshake_s
        self._max_payload = max_payload
        self.instance = secrets.randbits(64)

    @property
    def address(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"tcp://{host}:{self._port}"

    def listen(self) -> socket.socket:
        """ConfigError: it cannot listen there."""
        try:
            listener = socket.create_server(
                (self._host, self._port),
                family=_family(self._host),
                backlog=1024,
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self.address}: {error.strerror}; "
                "set node.host to an address of this machine and node.port to a free port"
            ) from error
        listener.setblocking(False)
        self._port = listener.getsockname()[1]
        return listener

    async def dial(
        self, address: str, purpose: Purpose, ways: dict[str, bytes]
    ) -> tuple[Connection, Hello]:
        """The connection, and what the peer says of itself. PeerLost, BadInput."""
        host, port = _parse(address)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._handshake_s):
                found = await loop.getaddrinfo(
                    host, port, family=_family(host), type=socket.SOCK_STREAM
                )
                sock = socket.socket(*found[0][:3])
                self._tune(sock, purpose)
                connection = Connection(sock, address, max_payload=self._max_payload)
                try:
                    give_up_after(sock, self._silence_s)
                    await loop.sock_connect(sock, found[0][4])
                    give_up_after(sock, 0)
                    if self._tls:
                        await connection.secure(self._tls.dialling)
                    own = Hello(purpose, self.instance, self.address, ways)
                    return connection, await self._exchange(connection, own)
                except BaseException:
                    connection.close(PeerLost(f"{address}: not connected"))
                    raise
        except TimeoutError as error:
            if error.errno:  # the kernel's
                raise PeerLost(f"{address}: the host does not answer") from error
            raise PeerLost(f"{address}: no connection within {self._handshake_s} s") from None
        except UnicodeError as error:
            raise BadInput(f"address {address!r}: {error}") from error
        except OSError as error:
            raise PeerLost(f"{address}: cannot connect: {error.strerror}") from error

    async def _exchange(self, connection: Connection, own: Hello) -> Hello:
        """The listener's HELLO, for ours. With a secret, both have their proofs."""
        if self._secret is None:
            await connection.send([encode_hello(own)])
            return await connection.receive_hello()
        challenge = await connection.receive_challenge()
        own = msgspec.structs.replace(own, nonce=secrets.token_bytes(NONCE_BYTES))
        proof = self._secret.proof(DIALLER, challenge, unproved(own))
        await connection.send([encode_hello(msgspec.structs.replace(own, proof=proof))])
        peer = await connection.receive_hello()
        if not self._secret.proves(peer.proof, LISTENER, challenge, own.nonce, unproved(peer)):
            raise _unproved(connection)
        return peer

    async def welcome(self, connection: Connection) -> Hello:
        """What the peer that has dialled says of itself. ProtocolViolation: it is not of our
        cluster."""
        try:
            async with asyncio.timeout(self._handshake_s):
                if self._tls:
                    await connection.secure(self._tls.listening)
                peer = await self._welcomed(connection)
        except TimeoutError:
            raise PeerLost(f"{connection.address}: no HELLO within {self._handshake_s} s") from None
        self._tune(connection.sock, peer.purpose)
        connection.address = peer.address
        return peer

    async def _welcomed(self, connection: Connection) -> Hello:
        if self._secret is None:
            return await connection.receive_hello()
        connection.challenge = secrets.token_bytes(NONCE_BYTES)
        await connection.send([encode_challenge(connection.challenge)])
        peer = await connection.receive_hello()
        if not self._secret.proves(peer.proof, DIALLER, connection.challenge, unproved(peer)):
            raise _unproved(connection)
        return peer

    async def answer(self, connection: Connection, peer: Hello, ways: dict[str, bytes]) -> None:
        """`ways`: the direct way that was chosen, if there is one."""
        own = Hello(peer.purpose, self.instance, self.address, ways, asks=self._asks)
        if self._secret is not None:
            said = connection.challenge, peer.nonce, unproved(own)
            own = msgspec.structs.replace(own, proof=self._secret.proof(LISTENER, *said))
        await connection.send([encode_hello(own)])

    def _tune(self, sock: socket.socket, purpose: Purpose) -> None:
        sock.setblocking(False)
        keep_alive(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if purpose is Purpose.READS:
            if self._paced:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SHALLOW)
            else:
                set_buffer(sock, socket.SO_RCVBUF, DEEP)


def _unproved(connection: Connection) -> ProtocolViolation:
    return ProtocolViolation(
        f"{connection.address} does not prove that it is of this cluster: "
        "is node.secret_file the same everywhere?"
    )


def _family(host: str) -> socket.AddressFamily:
    """The address family of a host. A name means its IPv4 address, when listening and when
    dialling."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _parse(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadInput(f"address {address!r}: {error}") from None
    if parts.scheme != "tcp" or not host or not port:
        raise BadInput(f"address {address!r}: use tcp://HOST:PORT")
    return host, port
