"""State: what every bus promises of buckets (compare-and-set, expiry, watch) and objects."""

import asyncio
import hashlib
from contextlib import aclosing
from typing import Any, cast

import pytest

from shared.bus.base import Bus, KeyValue, KvEntry, KvOp
from shared.bus.delivery import MAX_PAYLOAD
from shared.errors import BadInput, BusError, KeyExists, NotFound
from tests.contract.conftest import OpenBus

WAIT_S = 100.0
EXPIRY_S = 60.0
"""A watch tells the end of a key within this, after its time to live: 1 s, and 1 for us."""


@pytest.fixture
async def bucket(bus: Bus) -> KeyValue:
    return await bus.kv("bucket")


class Watch:
    """A watch that is read on, entry by entry, with a deadline."""

    def __init__(self, bucket: KeyValue) -> None:
        self._entries = bucket.watch()

    async def __aenter__(self) -> "Watch":
        return self

    async def __aexit__(self, *exc: object) -> None:
        async with aclosing(cast(Any, self._entries)):
            pass

    async def next(self, wait: float = WAIT_S) -> KvEntry | None:
        async with asyncio.timeout(wait):
            return await anext(self._entries)

    async def told(self, *expected: KvEntry | None) -> None:
        for entry in expected:
            assert await self.next() == entry


def deleted(entry: KvEntry | None, key: str) -> bool:
    return entry is not None and entry.key == key and entry.op is KvOp.DELETE and not entry.value


async def test_a_value_put_is_got_with_its_revision(bucket: KeyValue) -> None:
    first = await bucket.put("a.b", b"one")
    assert await bucket.get("a.b") == KvEntry("a.b", b"one", first)
    second = await bucket.put("a.b", b"two")
    assert second > first
    assert await bucket.get("a.b") == KvEntry("a.b", b"two", second)
    assert await bucket.get("a.c") is None


async def test_a_key_is_deleted_at_the_revision_that_is_named(bucket: KeyValue) -> None:
    first = await bucket.put("a", b"one")
    second = await bucket.put("a", b"two")
    with pytest.raises(KeyExists):
        await bucket.delete("a", first)
    assert await bucket.get("a") == KvEntry("a", b"two", second)
    await bucket.delete("a", second)
    assert await bucket.get("a") is None
    assert await bucket.create("a", b"three") > second


async def test_an_empty_value_is_a_value(bucket: KeyValue) -> None:
    revision = await bucket.put("key", b"")
    assert await bucket.get("key") == KvEntry("key", b"", revision)


async def test_a_bucket_is_the_same_for_every_bus(bus: Bus, other: Bus) -> None:
    revision = await (await bus.kv("bucket")).put("key", b"value")
    there = await other.kv("bucket")
    assert await there.get("key") == KvEntry("key", b"value", revision)
    assert await (await other.kv("another")).get("key") is None


async def test_create_refuses_a_key_that_exists(bucket: KeyValue) -> None:
    await bucket.create("key", b"mine")
    with pytest.raises(KeyExists, match="key"):
        await bucket.create("key", b"yours")
    entry = await bucket.get("key")
    assert entry is not None
    assert entry.value == b"mine"


async def test_a_deleted_key_can_be_created_again(bucket: KeyValue) -> None:
    await bucket.create("key", b"one")
    await bucket.delete("key")
    assert await bucket.get("key") is None
    revision = await bucket.create("key", b"two")
    assert await bucket.get("key") == KvEntry("key", b"two", revision)
    with pytest.raises(KeyExists):
        await bucket.create("key", b"three")


async def test_one_of_two_creators_wins(bus: Bus, other: Bus) -> None:
    buckets = [await bus.kv("bucket"), await other.kv("bucket")]
    outcomes = await asyncio.gather(
        *(bucket.create("key", b"%d" % i) for i, bucket in enumerate(buckets)),
        return_exceptions=True,
    )
    assert {type(outcome) for outcome in outcomes} == {int, KeyExists}


async def test_update_wants_the_last_revision(bucket: KeyValue) -> None:
    first = await bucket.create("key", b"one")
    second = await bucket.update("key", b"two", first)
    with pytest.raises(KeyExists, match="revision"):
        await bucket.update("key", b"three", first)
    assert await bucket.get("key") == KvEntry("key", b"two", second)
    with pytest.raises(KeyExists):
        await bucket.update("missing", b"value", first)


async def test_update_refuses_a_deleted_key(bucket: KeyValue) -> None:
    revision = await bucket.create("key", b"one")
    await bucket.delete("key")
    with pytest.raises(KeyExists):
        await bucket.update("key", b"two", revision)


async def test_deleting_what_is_not_there_is_no_error(bucket: KeyValue) -> None:
    await bucket.delete("key")
    assert await bucket.get("key") is None


async def test_entries_are_the_live_keys(bucket: KeyValue) -> None:
    assert await bucket.entries() == []
    one = await bucket.put("one", b"1")
    await bucket.put("two", b"2")
    three = await bucket.put("three", b"3")
    await bucket.delete("two")
    assert await bucket.entries() == [KvEntry("one", b"1", one), KvEntry("three", b"3", three)]


async def test_many_entries(bucket: KeyValue) -> None:
    await asyncio.gather(*(bucket.put(f"key.{i}", b"%d" % i) for i in range(1500)))
    assert {entry.key for entry in await bucket.entries()} == {f"key.{i}" for i in range(1500)}


async def test_a_watch_of_an_empty_bucket_begins_with_none(bucket: KeyValue) -> None:
    async with Watch(bucket) as watch:
        await watch.told(None)
        revision = await bucket.put("key", b"value")
        await watch.told(KvEntry("key", b"value", revision))


async def test_a_watch_tells_what_is_there_then_what_changes(bus: Bus, other: Bus) -> None:
    here, there = await bus.kv("bucket"), await other.kv("bucket")
    one = await there.put("one", b"1")
    await there.put("gone", b"")
    await there.delete("gone")
    two = await there.put("two", b"2")
    async with Watch(here) as watch:
        await watch.told(KvEntry("one", b"1", one), KvEntry("two", b"2", two), None)
        changed = await there.update("one", b"1b", one)
        await watch.told(KvEntry("one", b"1b", changed))
        await there.delete("two")
        assert deleted(await watch.next(), "two")
        again = await there.create("two", b"2b")
        await watch.told(KvEntry("two", b"2b", again))


async def test_two_watches_tell_the_same(bucket: KeyValue) -> None:
    async with Watch(bucket) as one, Watch(bucket) as two:
        await one.told(None)
        await two.told(None)
        for i in range(9):  # each is told before the next, which could overtake it
            entry = KvEntry("key", b"%d" % i, await bucket.put("key", b"%d" % i))
            await one.told(entry)
            await two.told(entry)


async def test_a_watch_comes_to_the_last_of_many_changes(bucket: KeyValue) -> None:
    async with Watch(bucket) as watch:
        await watch.told(None)
        for i in range(9):
            last = KvEntry("key", b"%d" % i, await bucket.put("key", b"%d" % i))
        revisions = [0]
        while (entry := await watch.next()) != last:
            assert entry is not None
            revisions.append(entry.revision)
        assert revisions == sorted(set(revisions))


async def test_a_key_expires_and_watches_see_it(bucket: KeyValue) -> None:
    async with Watch(bucket) as watch:
        await watch.told(None)
        revision = await bucket.create("lease", b"node", ttl=1)
        await watch.told(KvEntry("lease", b"node", revision))
        assert deleted(await watch.next(1 + EXPIRY_S), "lease")
        assert await bucket.get("lease") is None
        assert await bucket.entries() == []
        again = await bucket.create("lease", b"node", ttl=1)
        await watch.told(KvEntry("lease", b"node", again))


async def test_renewals_keep_a_key_alive(bucket: KeyValue) -> None:
    loop = asyncio.get_running_loop()
    async with Watch(bucket) as watch:
        await watch.told(None)
        began = loop.time()
        revision = await bucket.create("lease", b"0", ttl=2)
        await watch.told(KvEntry("lease", b"0", revision))
        while loop.time() < began + 2.5:
            await asyncio.sleep(0.4)  # the interval of renewals, not a wait for something
            revision = await bucket.update("lease", b"n", revision, ttl=2)
            await watch.told(KvEntry("lease", b"n", revision))
        assert deleted(await watch.next(2 + EXPIRY_S), "lease")
        with pytest.raises(KeyExists):
            await bucket.update("lease", b"late", revision, ttl=2)


async def test_a_key_put_without_a_lifetime_does_not_expire(bucket: KeyValue) -> None:
    async with Watch(bucket) as watch:
        await watch.told(None)
        await bucket.create("kept", b"0", ttl=1)
        kept = await bucket.put("kept", b"1")
        await bucket.create("fence", b"", ttl=1)
        # A watch that is behind is not told of values that others have taken the place of.
        while await watch.next() != KvEntry("kept", b"1", kept):
            pass
        assert (await watch.next()) is not None
        assert deleted(await watch.next(1 + EXPIRY_S), "fence")
        assert await bucket.get("kept") == KvEntry("kept", b"1", kept)


@pytest.mark.parametrize("ttl", [0, 0.5, 1.5, -1])
async def test_lifetimes_are_whole_seconds(bucket: KeyValue, ttl: float) -> None:
    with pytest.raises(BadInput, match="whole number of seconds"):
        await bucket.create("key", b"", ttl=ttl)


@pytest.mark.parametrize("key", ["", ".", "a..b", "a.", "a b", "a.*", ">", "ä"])
async def test_bad_keys_are_refused(bucket: KeyValue, key: str) -> None:
    with pytest.raises(BadInput, match="key"):
        await bucket.put(key, b"")
    with pytest.raises(BadInput, match="key"):
        await bucket.get(key)


async def test_a_value_over_the_limit_is_refused(bucket: KeyValue) -> None:
    with pytest.raises(BusError, match="limit"):
        await bucket.put("key", b"x" * (MAX_PAYLOAD + 1))


async def test_a_watch_ends_with_an_error_when_its_bus_closes(open_bus: OpenBus) -> None:
    closing = await open_bus("closing")
    watch = Watch(await closing.kv("bucket"))
    await watch.told(None)
    waiting = asyncio.ensure_future(watch.next())
    await asyncio.sleep(0)
    await closing.__aexit__(None, None, None)
    with pytest.raises(BusError, match="not open"):
        await waiting


async def test_objects_are_named_by_their_content(bus: Bus, other: Bus) -> None:
    data = bytes(range(256)) * 4096 * 3 + b"tail"
    name = await (await bus.objects()).put(data)
    assert name == hashlib.sha256(data).hexdigest()
    there = await other.objects()
    assert await there.get(name) == data
    assert await there.put(data) == name
    assert await there.get(name) == data


async def test_an_empty_object(bus: Bus) -> None:
    objects = await bus.objects()
    assert await objects.get(await objects.put(b"")) == b""


async def test_a_missing_object_is_not_found(bus: Bus) -> None:
    objects = await bus.objects()
    with pytest.raises(NotFound, match="0" * 64):
        await objects.get("0" * 64)


async def test_objects_put_at_once(bus: Bus, other: Bus) -> None:
    data = b"x" * 500_000
    stores = [await bus.objects(), await other.objects()]
    names = await asyncio.gather(*(store.put(data) for store in stores))
    assert names[0] == names[1]
    assert await stores[0].get(names[0]) == data
