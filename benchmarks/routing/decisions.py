"""How long a choice takes, in microseconds of processor time."""

import random
import time
from collections.abc import Callable, Iterator
from functools import partial

from services.gateway.core import affinity
from services.gateway.core.requests import Request
from services.gateway.core.routing import choose
from services.gateway.core.table import Table
from shared.ids import InstanceId, ModelId, ModelName, NodeId, RequestId
from shared.messages.instances import Instance, InstanceSet, InstanceState, Stage
from shared.messages.serving import Sampling

ROUNDS, SLOTS, PROMPT = 5000, 8, tuple(range(2048))
FULL = (0.0, 0.5, 0.95, 1.0)
"""Shares of the instances that have no free slot."""


def decisions(instances: int) -> Iterator[tuple[str, float]]:
    """(what, microseconds)."""
    for share in FULL:
        table = _table(instances, share)
        what = f"by load, {share:.0%} full"
        yield what, _us(partial(_by_load, table), _request)
    table = _table(instances, 0.5)
    known = _request(0)
    for route in list(table.open)[:8]:
        affinity.learn(table, known, route)
    next(table.ring.homes(""))

    def asked(session: str) -> Callable[[int], Request]:
        def make(number: int) -> Request:
            one = _request(number)
            one.session = session and f"{session}{number}"
            one.marks = known.marks
            return one

        return make

    def prefer(one: Request) -> object:
        return affinity.prefer(table, one, 0.0)

    yield "by session", _us(prefer, asked("s"))
    yield "by prefix, 2,048 tokens known", _us(prefer, asked(""))


DRAW = random.Random(0).random


def _by_load(table: Table, one: Request) -> object:
    return choose(table, one, 0.0, DRAW)


def _us(step: Callable[[Request], object], make: Callable[[int], Request]) -> float:
    requests = [make(number) for number in range(ROUNDS)]
    began = time.thread_time()
    for one in requests:
        step(one)
    return (time.thread_time() - began) / ROUNDS * 1e6


def _request(number: int) -> Request:
    return Request(RequestId(f"r{number}"), ModelId("m"), PROMPT, 64, (), Sampling(), 0.0)


def _table(instances: int, full: float) -> Table:
    """Instances of three speeds."""
    made = tuple(
        Instance(
            id=InstanceId(f"i{i}"),
            stages=(Stage(NodeId(f"n{i}"), "", 0, 1),),
            state=InstanceState.SERVING,
            capacity=(0.5, 1.0, 1.5)[i % 3],
            slots=SLOTS,
            event=None,
        )
        for i in range(instances)
    )
    table = Table()
    table.apply(
        InstanceSet(name=ModelName("m"), model_id=ModelId("m"), epoch=1, revision=1, instances=made)
    )
    routes = random.Random(0).sample(list(table.routes.values()), round(full * instances))
    for route in routes:
        for slot in range(SLOTS):
            one = _request(slot)
            route.begin(one, one.work, 0)
    return table
