"""Limits of tenants and keys: requests and tokens a minute, and completions at a time.

Each rate is a token bucket that holds a minute's worth and fills at the limit's rate. A call is
charged the most that it may use when it is let in, and what it did not use is given back when it
ends. A call that may use more than the bucket ever holds is let in when the bucket is full, and
leaves a debt: others wait until that is paid. So over any time t, in minutes, no more is used than
limit x (1 + t), and what the last call exceeds the bucket by.

Several gateways keep the same buckets: each takes from its own what others say that they took.
Until it has heard of it (0.1 s) two gateways may spend the same tokens. Then both buckets are in
debt, so what was spent twice is missing later: it does not grow with time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil

from services.gateway.core.callers import Account
from shared.errors import BadInput, CapacityExceeded
from shared.ids import GatewayId
from shared.messages.access import Limits
from shared.messages.quotas import AccountUse

MINUTE_S = 60.0
SILENT_S = 3.0
"""A gateway that has said nothing for so long has nothing running any more."""
FORGET_S = 2 * MINUTE_S
"""An account that was not used for so long has full buckets."""
STAY_S = 1.0
"""How long a call is taken to run while none has ended."""
ROUNDING = 1e-6
"""Less than this is missing for nothing but rounding."""
SMOOTHING = 8
"""How long a call runs is averaged over so many calls."""


class QuotaExceeded(CapacityExceeded):
    """The tenant or key has used what it may use for now."""

    code = "rate_limit_exceeded"


class Bucket:
    def __init__(self, limit: int, now: float) -> None:
        """`limit`: for a minute. 0: there is none."""
        self.limit = limit
        self.left = float(limit)
        self._at = now

    def fill(self, now: float) -> None:
        gained = (now - self._at) * self.limit / MINUTE_S
        self.left = min(self.left + gained, float(self.limit))
        self._at = now

    def take(self, amount: float) -> None:
        """Less than nothing gives back."""
        if self.limit:
            self.left = min(self.left - amount, float(self.limit))

    def wait_s(self, amount: float) -> float:
        """Seconds until as much is there, or, if it never holds as much, until it is full."""
        if not self.limit:
            return 0.0
        missing = min(amount, self.limit) - self.left
        return missing * MINUTE_S / self.limit if missing > ROUNDING else 0.0

    def change(self, limit: int) -> None:
        """What was used stays used."""
        self.left = self.left + limit - self.limit if limit else 0.0
        self.limit = limit


@dataclass(slots=True)
class _State:
    """An account, as all gateways together use it."""

    limits: Limits
    requests: Bucket
    tokens: Bucket
    used_at: float
    life: int
    own_requests: int = 0
    own_tokens: int = 0
    own_running: int = 0
    others_running: int = 0
    stay_s: float = STAY_S
    """How long calls run, lately."""

    def follow(self, limits: Limits) -> None:
        if limits != self.limits:
            self.limits = limits
            self.requests.change(limits.requests_per_min)
            self.tokens.change(limits.tokens_per_min)

    def fill(self, now: float) -> None:
        self.requests.fill(now)
        self.tokens.fill(now)

    def use(self) -> AccountUse:
        return AccountUse(
            self.own_requests,
            self.own_tokens,
            self.own_running,
            self.requests.left,
            self.tokens.left,
            self.life,
        )


@dataclass(slots=True)
class _Gateway:
    heard_at: float
    said: dict[str, AccountUse] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Charge:
    """What a call was charged. It is settled once."""

    accounts: tuple[Account, ...]
    tokens: int
    sequences: int
    at: float
    settled: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """How much of a limit is left, and the seconds until all of it is."""

    limit: int
    left: int
    full_s: float


class Quotas:
    def __init__(self) -> None:
        self._states: dict[str, _State] = {}
        self._others: dict[GatewayId, _Gateway] = {}
        self._changed: set[str] = set()
        self._lives = 0

    # --- calls ---------------------------------------------------------------

    def admit(
        self, accounts: tuple[Account, ...], sequences: int, tokens: int, now: float
    ) -> Charge:
        """Charges a call to all accounts, or none. QuotaExceeded says when it would be let in;
        BadInput: never.

        `tokens`: the most that it may use. `sequences`: its completions."""
        states = [self._state(account, now) for account in accounts]
        for account, state in zip(accounts, states, strict=True):
            _check(account, state, sequences, tokens)
        for account, state in zip(accounts, states, strict=True):
            state.requests.take(1)
            state.tokens.take(tokens)
            state.own_requests += 1
            state.own_tokens += tokens
            state.own_running += sequences
            self._changed.add(account.name)
        return Charge(accounts, tokens, sequences, now)

    def settle(self, charge: Charge, used: int, now: float) -> None:
        """The call has ended and used so many tokens: the rest is given back."""
        for state in self._end(charge, used, now):
            state.stay_s += (now - charge.at - state.stay_s) / SMOOTHING

    def take_back(self, charge: Charge, now: float) -> None:
        """Nothing came of the call."""
        for state in self._end(charge, 0, now):
            state.requests.take(-1)
            state.own_requests -= 1

    def _end(self, charge: Charge, used: int, now: float) -> list[_State]:
        if charge.settled:
            return []
        charge.settled = True
        states = []
        for account in charge.accounts:
            state = self._state(account, now)
            state.tokens.take(used - charge.tokens)
            state.own_tokens += used - charge.tokens
            state.own_running -= charge.sequences
            self._changed.add(account.name)
            states.append(state)
        return states

    def requests(self, accounts: Iterable[Account], now: float) -> Standing | None:
        """Of the account that has the smallest share of its requests left; None: no limit."""
        return _tightest(self._state(account, now).requests for account in accounts)

    def tokens(self, accounts: Iterable[Account], now: float) -> Standing | None:
        return _tightest(self._state(account, now).tokens for account in accounts)

    def _state(self, account: Account, now: float) -> _State:
        limits = account.limits
        state = self._states.get(account.name)
        if state is None:
            requests = Bucket(limits.requests_per_min, now)
            tokens = Bucket(limits.tokens_per_min, now)
            self._lives += 1
            state = _State(limits, requests, tokens, now, self._lives)
            self._states[account.name] = state
            for other in self._others.values():
                if use := other.said.get(account.name):
                    _adopt(state, use)
        state.follow(limits)
        state.fill(now)
        state.used_at = now
        return state

    # --- other gateways ------------------------------------------------------

    def report(self, *, whole: bool) -> dict[str, AccountUse]:
        """What to tell other gateways."""
        names = self._states.keys() if whole else self._changed
        accounts = {name: self._states[name].use() for name in names if name in self._states}
        self._changed.clear()
        return accounts

    def hear(
        self,
        gateway: GatewayId,
        accounts: Mapping[str, AccountUse],
        now: float,
        *,
        whole: bool,
    ) -> None:
        """Takes in what another gateway has used. `whole`: accounts that it does not name are none
        of its own."""
        known = self._others.setdefault(gateway, _Gateway(now))
        known.heard_at = now
        for name in known.said.keys() - accounts.keys() if whole else ():
            self._unsay(name, known.said.pop(name))
        for name, use in accounts.items():
            before = known.said.get(name)
            if before is not None and before.life != use.life:
                self._unsay(name, before)
                before = None
            known.said[name] = use
            if (state := self._states.get(name)) is None:
                continue
            state.fill(now)
            if before is None:
                _adopt(state, use)
            else:
                state.requests.take(use.requests - before.requests)
                state.tokens.take(use.tokens - before.tokens)
                state.others_running += use.running - before.running

    def tick(self, now: float) -> None:
        """Forgets gateways that are gone, and accounts that nobody uses."""
        for gateway, known in list(self._others.items()):
            if now - known.heard_at > SILENT_S:
                del self._others[gateway]
                for name, use in known.said.items():
                    self._unsay(name, use)
        for name, state in list(self._states.items()):
            if now - state.used_at > FORGET_S and not state.own_running:
                state.fill(now)
                full = state.requests.left >= state.requests.limit
                if full and state.tokens.left >= state.tokens.limit:
                    del self._states[name]

    def _unsay(self, name: str, use: AccountUse) -> None:
        """What another gateway said has running there no longer has."""
        if state := self._states.get(name):
            state.others_running -= use.running


def _adopt(state: _State, use: AccountUse) -> None:
    """Begins with what another gateway knows of an account: both keep the same buckets."""
    state.requests.left = min(state.requests.left, use.requests_left)
    state.tokens.left = min(state.tokens.left, use.tokens_left)
    state.others_running += use.running


def _check(account: Account, state: _State, sequences: int, tokens: int) -> None:
    limits = state.limits
    if 0 < limits.concurrency < sequences:
        raise BadInput(
            f"{sequences} completions in one call are too many for {account.name}, which may have "
            f"{limits.concurrency} at a time: lower n, or send fewer prompts"
        )
    wait_s, reason = state.requests.wait_s(1), f"{limits.requests_per_min} requests a minute"
    if (tokens_s := state.tokens.wait_s(tokens)) > wait_s:
        wait_s = tokens_s
        reason = f"{limits.tokens_per_min} tokens a minute, this one may use {tokens}"
    if wait_s > 0:
        raise _exceeded(account, reason, wait_s)
    running = state.own_running + state.others_running
    if limits.concurrency and running + sequences > limits.concurrency:
        reason = f"{limits.concurrency} completions at a time, {running} run"
        raise _exceeded(account, reason, state.stay_s / limits.concurrency)


def _exceeded(account: Account, reason: str, wait_s: float) -> QuotaExceeded:
    when = f"try again in {max(1, ceil(wait_s))} s"
    return QuotaExceeded(f"Rate limit reached for {account.name} ({reason}): {when}", wait_s)


def _tightest(buckets: Iterable[Bucket]) -> Standing | None:
    limited = [bucket for bucket in buckets if bucket.limit]
    if not limited:
        return None
    least = min(limited, key=lambda bucket: bucket.left / bucket.limit)
    return Standing(least.limit, max(0, int(least.left)), least.wait_s(least.limit))
