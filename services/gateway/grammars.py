"""Checks the grammars of clients before a node sees them, in a process that they may kill."""

import asyncio
from functools import partial
from hashlib import sha256

from shared.confined.jobs import Check, Refused
from shared.confined.pool import ConfinedPool
from shared.errors import BadInput
from shared.grammar import MAX_CHARS

MAX_WAITING = 64
"""The most grammars that wait to be checked. Further grammars are refused."""
MAX_KNOWN = 4096
"""The number of grammars whose check is remembered."""
_KEY = "grammars"


class GrammarChecker:
    def __init__(self, pool: ConfinedPool) -> None:
        self._pool = pool
        self._known: dict[bytes, str | None] = {}
        """What is wrong with each grammar, by its digest, the oldest first."""
        self._checking: dict[bytes, asyncio.Future[str | None]] = {}

    async def check(self, grammar: str) -> None:
        """BadInput if the grammar cannot be followed or takes too much; CapacityExceeded if too
        many wait."""
        if len(grammar) > MAX_CHARS:
            raise BadInput(f"has {len(grammar)} characters, at most {MAX_CHARS} are taken")
        digest = sha256(grammar.encode()).digest()
        if digest not in self._known:
            self._remember(digest, await self._problem(digest, grammar))
        if (problem := self._known[digest]) is not None:
            raise BadInput(problem)

    async def _problem(self, digest: bytes, grammar: str) -> str | None:
        """A grammar that is being checked already is not checked again."""
        if digest not in self._checking:
            checking = asyncio.ensure_future(self._ask(grammar))
            checking.add_done_callback(partial(self._checked, digest))
            self._checking[digest] = checking
        return await asyncio.shield(self._checking[digest])

    def _checked(self, digest: bytes, checking: "asyncio.Future[str | None]") -> None:
        del self._checking[digest]
        if not checking.cancelled():
            checking.exception()  # even if whoever asked has gone

    async def _ask(self, grammar: str) -> str | None:
        outcome = await self._pool.run(Check(grammar), key=_KEY, most_waiting=MAX_WAITING)
        return outcome.why if isinstance(outcome, Refused) else None

    def _remember(self, digest: bytes, problem: str | None) -> None:
        self._known[digest] = problem
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
