"""Limits hold over any time, at one gateway and at several that tell each other."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.callers import Account
from services.gateway.core.quotas import MINUTE_S, SILENT_S, Charge, QuotaExceeded, Quotas
from shared.errors import BadInput
from shared.ids import GatewayId
from shared.messages.access import Limits

LIMIT = 60
TOKENS = 600


def account(requests: int = 0, tokens: int = 0, concurrency: int = 0, name: str = "a") -> Account:
    limits = Limits(requests_per_min=requests, tokens_per_min=tokens, concurrency=concurrency)
    return Account(name, limits)


def wait_s(quotas: Quotas, accounts: tuple[Account, ...], tokens: int, now: float) -> float:
    """How long the call has to wait; 0: it is let in, and charged."""
    try:
        quotas.admit(accounts, 1, tokens, now)
    except QuotaExceeded as error:
        return error.retry_after_s or 0.0
    return 0.0


calls = st.lists(
    st.tuples(
        st.floats(0, 20),  # seconds since the call before
        st.integers(0, 2 * TOKENS),  # the most that it may use
        st.floats(0, 1),  # the share of it that it uses
        st.floats(0, 30),  # how long it runs
    ),
    max_size=40,
)


@given(calls=calls)
def test_over_any_time_no_more_is_used_than_the_limit_lets(
    calls: list[tuple[float, int, float, float]],
) -> None:
    quotas, mine = Quotas(), (account(LIMIT, TOKENS),)
    ends: list[tuple[float, Charge, int]] = []
    let_in: list[tuple[float, int]] = []
    now = 0.0
    for gap, most, share, runs_s in calls:
        now += gap
        for end in sorted((end for end in ends if end[0] <= now), key=lambda end: end[0]):
            ends.remove(end)
            quotas.settle(end[1], end[2], end[0])
        try:
            charge = quotas.admit(mine, 1, most, now)
        except QuotaExceeded:
            continue
        used = round(share * most)
        let_in.append((now, used))
        ends.append((now + runs_s, charge, used))
    for i, (start, _) in enumerate(let_in):
        for j in range(i, len(let_in)):
            minutes = (let_in[j][0] - start) / MINUTE_S
            assert j - i + 1 <= LIMIT * (1 + minutes) + 1e-6
            before_the_last = sum(used for _, used in let_in[i:j])
            assert before_the_last <= TOKENS * (1 + minutes) + 2 * TOKENS


@given(before=st.lists(st.integers(0, TOKENS), max_size=5), most=st.integers(0, 3 * TOKENS))
def test_retry_after_is_when_the_call_is_let_in_and_not_earlier(
    before: list[int], most: int
) -> None:
    for early in (False, True):
        quotas, mine = Quotas(), (account(2, TOKENS), account(LIMIT, 0, name="b"))
        for tokens in before:
            wait_s(quotas, mine, tokens, 0.0)
        if seconds := wait_s(quotas, mine, most, 0.0):
            again = wait_s(quotas, mine, most, seconds * 0.99 if early else seconds)
            assert (again > 0) == early


@given(calls=st.lists(st.tuples(st.integers(0, TOKENS), st.booleans()), max_size=20))
def test_what_was_not_used_is_given_back_and_no_more(calls: list[tuple[int, bool]]) -> None:
    quotas, mine = Quotas(), (account(LIMIT, TOKENS, 30),)
    for most, comes in calls:
        try:
            charge = quotas.admit(mine, 1, most, 0.0)
        except QuotaExceeded:
            break  # cannot be: all is given back
        if comes:
            quotas.settle(charge, 0, 0.0)
        else:
            quotas.take_back(charge, 0.0)
        quotas.settle(charge, 0, 0.0)  # a second time changes nothing
    else:
        requests, tokens = quotas.requests(mine, 0.0), quotas.tokens(mine, 0.0)
        assert requests
        assert tokens
        charge = quotas.admit(mine, 1, TOKENS, 0.0)
        for _ in range(2):
            quotas.settle(charge, 100, 0.0)
        later = quotas.tokens(mine, 0.0)
        assert later
        assert later.left == TOKENS - 100
        assert requests.left == LIMIT - sum(comes for _, comes in calls)
        assert tokens.left == TOKENS
        quotas.admit(mine, 30, 0, 0.0)
        return
    raise AssertionError("refused")


@given(sizes=st.lists(st.integers(1, 6), max_size=30))
def test_no_more_completions_run_than_may(sizes: list[int]) -> None:
    quotas, mine = Quotas(), (account(concurrency=4),)
    running: deque[Charge] = deque()
    for size in sizes:
        free = 4 - sum(charge.sequences for charge in running)
        try:
            running.append(quotas.admit(mine, size, 9, 0.0))
            assert size <= free
        except BadInput:
            assert size > 4
        except QuotaExceeded:
            assert free < size <= 4
            quotas.settle(running.popleft(), 9, 0.0)


def test_an_account_that_refuses_costs_the_others_nothing() -> None:
    quotas = Quotas()
    wide, narrow = account(LIMIT, name="tenant"), account(1, name="key")
    assert not wait_s(quotas, (wide, narrow), 1, 0.0)
    assert wait_s(quotas, (wide, narrow), 1, 0.0) > 0
    left = quotas.requests((wide,), 0.0)
    assert left
    assert left.left == LIMIT - 1


def test_a_call_larger_than_the_bucket_waits_until_it_is_full_and_leaves_a_debt() -> None:
    quotas, mine = Quotas(), (account(tokens=TOKENS),)
    assert not wait_s(quotas, mine, 3 * TOKENS, 0.0)
    assert wait_s(quotas, mine, 1, 0.0) == pytest.approx(2 * MINUTE_S + MINUTE_S / TOKENS)


def test_a_limit_that_changes_counts_for_what_was_used() -> None:
    quotas = Quotas()
    for _ in range(10):
        assert not wait_s(quotas, (account(10),), 1, 0.0)
    left = quotas.requests((account(15),), 0.0)
    assert left
    assert left.left == 5


class Several:
    """Gateways that tell each other what they use, each time to all."""

    def __init__(self, count: int) -> None:
        self.quotas = {GatewayId(f"g{i}"): Quotas() for i in range(count)}

    def tell(self, now: float, *, whole: bool, lost: bool = False) -> None:
        reports = {name: quotas.report(whole=whole) for name, quotas in self.quotas.items()}
        for quotas in self.quotas.values():
            quotas.tick(now)
        for name, quotas in self.quotas.items() if not lost else ():
            for other, accounts in reports.items():
                if other != name and accounts:
                    quotas.hear(other, accounts, now, whole=whole)


@given(
    gateways=st.integers(2, 4),
    per_tick=st.integers(1, 3),
    ticks=st.integers(1, 1500),
    losses=st.sets(st.integers(0, 1500), max_size=200),
)
def test_gateways_do_not_multiply_a_limit(
    gateways: int, per_tick: int, ticks: int, losses: set[int]
) -> None:
    """Every gateway lets in what it can, 20 times a second. What is too much at first is missing
    later. Lost reports, but for whole ones, only delay that."""
    there = Several(gateways)
    mine = (account(LIMIT),)
    total = 0
    for tick in range(1, ticks + 1):
        now = tick / 20
        for quotas in there.quotas.values():
            total += sum(wait_s(quotas, mine, 1, now) == 0 for _ in range(per_tick))
        whole = tick % 20 == 0
        there.tell(now, whole=whole, lost=tick in losses and not whole)
        late_s = 2.0 if losses else 0.05
        at_once = min(LIMIT, 2 * per_tick * 20 * late_s)
        assert total <= LIMIT * (1 + now / MINUTE_S) + (gateways - 1) * at_once + 1


def test_completions_at_a_time_count_everywhere_until_their_gateway_is_gone() -> None:
    there = Several(2)
    one, other = there.quotas.values()
    mine = (account(concurrency=3),)
    charge = one.admit(mine, 2, 1, 0.0)
    there.tell(0.0, whole=False)
    other.admit(mine, 1, 1, 0.0)
    with pytest.raises(QuotaExceeded):
        other.admit(mine, 1, 1, 0.0)
    one.settle(charge, 1, 0.0)
    there.tell(0.0, whole=False)
    other.admit(mine, 2, 1, 0.0)
    with pytest.raises(QuotaExceeded):
        other.admit(mine, 1, 1, 0.0)
    there.tell(0.0, whole=True)
    with pytest.raises(QuotaExceeded):
        one.admit(mine, 1, 1, 0.0)
    one.tick(2 * SILENT_S)
    one.admit(mine, 3, 1, 2 * SILENT_S)


def test_what_a_whole_report_does_not_name_runs_no_more() -> None:
    quotas, mine, other = Quotas(), (account(concurrency=1),), GatewayId("other")
    elsewhere = Quotas()
    elsewhere.admit(mine, 1, 1, 0.0)
    quotas.hear(other, elsewhere.report(whole=True), 0.0, whole=True)
    assert wait_s(quotas, mine, 1, 0.0) > 0
    quotas.hear(other, {}, 0.0, whole=True)
    assert not wait_s(quotas, mine, 1, 0.0)


def test_a_gateway_that_starts_begins_with_what_others_have_left() -> None:
    old, new = Quotas(), Quotas()
    mine = (account(10),)
    for _ in range(10):
        assert not wait_s(old, mine, 1, 0.0)
    new.hear(GatewayId("old"), old.report(whole=True), 0.0, whole=True)
    assert wait_s(new, mine, 1, 0.0) > 0


def test_sums_that_begin_anew_give_nothing_back() -> None:
    """The other gateway had forgotten the account, because nobody used it."""
    there = Several(2)
    one, other = there.quotas.values()
    mine = (account(10),)
    for quotas, calls in ((one, 9), (other, 1)):
        for charge in [quotas.admit(mine, 1, 1, 0.0) for _ in range(calls)]:
            quotas.settle(charge, 1, 0.0)
    there.tell(0.0, whole=False)
    later = 1000.0
    one.tick(later)
    assert not wait_s(one, mine, 1, later)
    for _ in range(8):
        assert not wait_s(other, mine, 1, later)
    other.hear(GatewayId("g0"), one.report(whole=False), later, whole=False)
    assert not wait_s(other, mine, 1, later)
    assert not wait_s(other, mine, 1, later)
    assert wait_s(other, mine, 1, later) > 0
