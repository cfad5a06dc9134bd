"""Where requests wait, when new ones would have their turn, and whether they are let in."""

from collections.abc import Sequence

import msgspec

from services.gateway.core import admission
from services.gateway.core.fair_queue import FairQueue
from services.gateway.core.ledger import Rules
from services.gateway.core.pace import Pace
from services.gateway.core.requests import Request
from services.gateway.core.table import Table
from shared.messages.instances import Coming

STALE_S = 5.0
"""A planner that has said nothing for so long is gone, and what it expected is not told on."""


class Turns:
    def __init__(self, table: Table, queue: FairQueue[Request], rules: Rules) -> None:
        self.pace = Pace()
        self._table = table
        self._queue = queue
        self._rules = rules
        self._coming: Coming | None = None
        self._coming_at = 0.0
        """When that was so."""

    def place(self, request: Request) -> float:
        """Where the request waits among those of its tenant (`routing` has the rule): the time at
        which an idle instance with nothing cached would give its first token. Until nodes have
        measured a prefill, that is when it came."""
        by_due_date = self._rules.routing.by_due_date
        prefill_s = self._table.prefill_s * len(request.prompt) if by_due_date else 0.0
        return request.waiting_since + prefill_s

    def hear(self, coming: Coming | None, now: float) -> None:
        """The planner has said what the model's scaling event brings."""
        self._coming, self._coming_at = coming, now

    def turn_s(self, now: float) -> float:
        """Seconds until a request that comes now would probably begin."""
        waiting, slots = len(self._queue) + 1, self._table.slots
        return self.pace.told_s(waiting, slots, len(self._table.routes), now, self.coming(now))

    def coming(self, now: float) -> Coming | None:
        """What the model's scaling event brings, from now."""
        coming, passed_s = self._coming, now - self._coming_at
        if coming is None or passed_s > STALE_S:
            return None
        first_s, complete_s = coming.first_s, coming.complete_s
        return msgspec.structs.replace(
            coming,
            first_s=None if first_s is None else max(0.0, first_s - passed_s),
            complete_s=None if complete_s is None else max(0.0, complete_s - passed_s),
        )

    def check_in_time(self, requests: Sequence[Request], now: float) -> None:
        """CapacityExceeded for a call that would probably miss the model's objective, while the
        planner can add no replica. It names when a call would be in time."""
        within_s = self._table.within_s if self._rules.routing.refuses else 0.0
        if not within_s or (not self._queue and self._table.has_free(now)):
            return
        waiting = len(self._queue) + len(requests)
        turn_s = self.pace.turn_s(waiting, self._table.slots, now)
        prompt = max(len(request.prompt) for request in requests)
        own_s = self._table.decode_s + self._table.prefill_s * prompt
        admission.check_in_time(turn_s, own_s, within_s)
