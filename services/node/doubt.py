"""What the node makes of a gateway that says that its answers are wrong.

It ends if it finds itself that its answers have changed, or the weights in its memory. No gateway's
word alone ends it.
"""

import math
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from services.node.core.known_answers import KnownAnswers
from services.node.hosting.hosting import Hosting
from shared.clock import now
from shared.messages.serving import Distrust

APART_S = 30.0
"""The least time between two checks, however often gateways say that the node is wrong."""


class Doubt:
    def __init__(
        self,
        answers: KnownAnswers,
        hosting: Hosting,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self.why = ""
        """What a gateway and the node itself found wrong; empty: nothing."""
        self._answers = answers
        self._hosting = hosting
        self._spawn = spawn
        self._log = log
        self._next_at = -math.inf

    async def hear(self, message: Distrust) -> None:
        if (at := now()) >= self._next_at:
            self._next_at = at + APART_S
            self._spawn(self._look(message.why), "a check of itself")

    async def _look(self, said: str) -> None:
        if changed := self._answers.changed():
            found = f"its answers have changed since it was first asked ({', '.join(changed)})"
        elif damaged := await self._hosting.damaged():
            found = f"its weights have changed in memory ({', '.join(damaged)})"
        else:
            self._log.warning("not believed: neither answers nor weights have changed", said=said)
            return
        self.why = f"{said}; {found}"
