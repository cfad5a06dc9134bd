"""Checks the grammars of clients before a node sees them, in a process that they may kill."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from hashlib import sha256
from pathlib import Path

import msgspec

from shared.errors import BadInput, CapacityExceeded, LambdaScaleError
from shared.grammar import MAX_CHARS

MAX_WAITING = 64
"""The most grammars that wait to be checked. Further grammars are refused."""
MAX_KNOWN = 4096
"""The number of grammars whose check is remembered."""
_ROOT = Path(__file__).parents[2]
_OVERFLOWS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
"""The signals that end a process whose stack or memory is used up."""


class GrammarChecker:
    """Checks one grammar at a time. The process is started when it is first needed."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._known: dict[bytes, str | None] = {}
        """What is wrong with each grammar, by its digest, the oldest first."""

    async def check(self, grammar: str) -> None:
        """BadInput if the grammar cannot be followed or takes too much; CapacityExceeded if too
        many wait."""
        if len(grammar) > MAX_CHARS:
            raise BadInput(f"has {len(grammar)} characters, at most {MAX_CHARS} are taken")
        digest = sha256(grammar.encode()).digest()
        if digest not in self._known:
            if self._waiting >= MAX_WAITING:
                raise CapacityExceeded("too many grammars wait to be checked: try again later")
            self._waiting += 1
            try:
                async with self._turn:
                    if digest not in self._known:
                        self._remember(digest, await self._ask(grammar))
            finally:
                self._waiting -= 1
        if (problem := self._known[digest]) is not None:
            raise BadInput(problem)

    async def close(self) -> None:
        if self._process is not None:
            await _end(self._process)

    def _remember(self, digest: bytes, problem: str | None) -> None:
        self._known[digest] = problem
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    async def _ask(self, grammar: str) -> str | None:
        if self._process is None or self._process.returncode is not None:
            program = (sys.executable, "-m", "services.gateway.grammar_process")
            self._process = await asyncio.create_subprocess_exec(
                *program, stdin=PIPE, stdout=PIPE, cwd=_ROOT
            )
        process = self._process
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(msgspec.json.encode(grammar) + b"\n")
            answer = await process.stdout.readline()
        except BaseException:  # its answer would be taken for that of the next grammar
            self._process = None
            await _end(process)
            raise
        if answer.endswith(b"\n"):
            return msgspec.json.decode(answer, type=str | None)
        self._process = None
        died_of = -await process.wait()
        if died_of == signal.SIGPROF:
            return "takes too long to follow"
        if died_of in _OVERFLOWS:
            return "has chains of rules that are too long, or takes too much memory"
        raise LambdaScaleError(f"the check of grammars ended with {-died_of}: try again")


async def _end(process: Process) -> None:
    """Waits for the process, even if it has to be killed."""
    if process.returncode is None:
        process.kill()
    await process.wait()
