"""KV on its way between this node's engine and its data plane.

The engine's thread takes pages out of a sequence's cache, or makes room for them, as a loan. The
data plane's threads copy, send and check the bytes. Then the loan is given back here. Not
thread-safe: the mover's callbacks come on other threads, and are posted to the engine's.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from services.node.core.kv import KvMover
from services.node.core.microbatches import Bring, KvAsk, KvHere, Lend
from services.node.core.rows import SequenceKey
from services.node.engine.base import Engine
from services.node.engine.kv_loan import KvLoan
from shared.errors import LambdaScaleError

Post = Callable[[Callable[[], None]], None]


class Listener(Protocol):
    def lent(self, lend: Lend, here: KvHere) -> None: ...

    def brought(self, bring: Bring, *, right: bool) -> None: ...


class KvMoves:
    def __init__(
        self, engine: Engine, mover: KvMover | None, listener: Listener, post: Post
    ) -> None:
        """`post` has something done on the engine's thread."""
        self._engine = engine
        self._mover = mover
        self._listener = listener
        self._post = post
        self._bringing: dict[SequenceKey, list[KvLoan]] = {}
        """By sequence, what is being brought."""
        self.sent_bytes = 0
        """Bytes of KV that other nodes were lent, since the start."""
        self.received_bytes = 0

    def asked(self, address: str, ask: KvAsk) -> KvAsk:
        """What is asked of the node at this address, with how this node would read the answer."""
        if self._mover is None or not self._mover.reads_device(address):
            return ask
        return msgspec.structs.replace(ask, reads_device=True)

    def lend(self, command: Lend) -> None:
        ask = command.ask
        none = KvHere(ask.taker, ask.stage, start=ask.start, stop=ask.stop)
        try:
            blocks = ask.start, ask.stop
            loan = self._engine.lend(ask.sequence, blocks, ask.first, ask.end)
        except LambdaScaleError:
            self._listener.lent(command, none)
            return
        form, nbytes = loan.form, loan.nbytes

        def done(region: str, digest: bytes) -> None:
            self._engine.give_back(loan)
            there = region, form, digest, ask.start, ask.stop, ask.first, ask.end
            here = KvHere(ask.taker, ask.stage, *there) if region else none
            self.sent_bytes += nbytes if region else 0
            self._listener.lent(command, here)

        if self._mover is None:
            done("", b"")
        else:
            self._mover.lend(
                loan,
                lambda *what: self._post(lambda: done(*what)),
                on_device=ask.reads_device,
            )

    def bring(self, command: Bring) -> None:
        here = command.here
        try:
            loan = self._engine.lend(command.sequence, command.blocks, *command.positions)
        except LambdaScaleError:
            self._listener.brought(command, right=False)
            return
        nbytes = loan.nbytes
        self._bringing.setdefault(command.sequence, []).append(loan)

        def done(right: bool) -> None:
            self._over(command.sequence, loan)
            self.received_bytes += nbytes if right else 0
            self._listener.brought(command, right=right)

        if self._mover is None or loan.form != here.form:
            done(False)
        else:
            self._mover.bring(
                command.address,
                here.region,
                here.digest,
                loan,
                lambda right: self._post(lambda: done(right)),
            )

    def stop(self, key: SequenceKey) -> None:
        """What is being brought for the sequence is not wanted any more: once this returns, its
        pages are not written to."""
        for loan in tuple(self._bringing.get(key, ())):
            self._over(key, loan)

    def _over(self, key: SequenceKey, loan: KvLoan) -> None:
        self._engine.give_back(loan)
        loans = self._bringing.get(key, [])
        if loan in loans:
            loans.remove(loan)
        if not loans:
            self._bringing.pop(key, None)

    def end(self, region: str) -> None:
        if self._mover is not None:
            self._mover.end(region)
