"""Events of a model whose prefill and decode are apart: who sends the weights."""

from dataclasses import replace

import msgspec

from services.planner.core.choose import AUTO
from shared.messages.instances import Role
from shared.messages.pool import Holding, Tier
from shared.messages.scaling import EventRecord
from tests.unit.planner.driver import EVERY, Driver, settings
from tests.unit.planner.scripted import MODEL, record

KV = 8_000
"""Bytes/s of KV, of the 10,000 that a link carries."""


def grown(kv: int) -> EventRecord:
    """`a` decodes and `b` prefills when `c` is asked for."""
    driver = Driver(replace(settings(), strategy=AUTO))
    driver.join("a", "b", "c")
    held = Holding(MODEL, Tier.GPU, EVERY)
    driver.status("a", held)
    driver.status("b", held)
    driver.publish(msgspec.structs.replace(record(min_instances=2), prefill_share=0.5))
    for second in range(5):
        driver.status("a", held, kv_bytes=(0, kv * second))
        driver.status("b", held, kv_bytes=(kv * second, 0))
        driver.wait(1.0)
    (found,) = driver.core.sets()
    assert {i.leader: i.role for i in found.instances} == {"a": Role.DECODE, "b": Role.PREFILL}
    driver.load(queued=20)
    return driver.begin("c", sources=("a", "b"))


def test_who_prefills_sends_no_weights_and_the_event_says_why() -> None:
    event = grown(KV)
    assert {t.src for t in event.transfers} == {"a"}
    assert event.sources == ("a",)
    assert event.ports == ("b sends no weights: KV takes 8 kB/s of 10 kB/s out of it",)


def test_without_much_kv_both_may_send() -> None:
    event = grown(kv=100)
    assert event.sources == ("a", "b")
    assert event.ports == ()
