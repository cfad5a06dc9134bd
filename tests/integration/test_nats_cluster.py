"""Three nats-servers that keep copies of each other's state."""

import asyncio
import os
import signal
from contextlib import aclosing, suppress
from pathlib import Path

import nats
import nats.errors
import pytest

from services.local.nats_servers import NatsServers
from shared.bus.base import KeyValue
from shared.bus.nats import NatsBus
from shared.config import BusConfig
from shared.errors import BusError, Conflict

WAIT_S = 60.0


def servers(directory: Path, count: int = 3) -> NatsServers:
    return NatsServers(directory, count, places={})


def bus_to(them: NatsServers) -> NatsBus:
    config = BusConfig(url=them.url, replicas=them.copies)
    return NatsBus(config, "one")


async def written(bucket: KeyValue, key: str, value: bytes) -> None:
    """Writes until a leader takes it."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await bucket.put(key, value)
                return
            except BusError:
                await asyncio.sleep(0.1)


async def read(bucket: KeyValue, key: str) -> bytes:
    """Reads until a leader answers. On a busy machine the servers may elect another one first."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                entry = await bucket.get(key)
            except BusError:
                await asyncio.sleep(0.1)
                continue
            assert entry is not None
            return entry.value


async def leader_of(them: NatsServers, stream: str) -> str:
    raw = await nats.connect(them.url.split(","))
    try:
        async with asyncio.timeout(WAIT_S):
            while True:
                with suppress(nats.errors.Error):
                    cluster = (await raw.jetstream().stream_info(stream)).cluster
                    if cluster is not None and cluster.leader:
                        return str(cluster.leader)
                await asyncio.sleep(0.1)
    finally:
        await raw.close()


async def test_a_bucket_that_many_open_at_once_answers_at_once(tmp_path: Path) -> None:
    """NATS tells of a stream before it has a leader, and answers nothing until then."""
    them = servers(tmp_path)
    await them.start()

    async def use(number: int, bucket: str) -> None:
        async with bus_to(them) as bus:
            opened = await bus.kv(bucket)
            assert await opened.get(f"key-{number}") is None
            await opened.create(f"key-{number}", b"value")

    try:
        for bucket in ("one", "two", "three"):
            await asyncio.gather(*(use(number, bucket) for number in range(5)))
    finally:
        await them.stop()


async def test_state_outlives_any_one_server_and_a_restart_of_all(tmp_path: Path) -> None:
    them = servers(tmp_path)
    await them.start()
    try:
        async with bus_to(them) as bus:
            bucket = await bus.kv("bucket")
            async with aclosing(bucket.watch()) as watch, asyncio.timeout(WAIT_S):
                assert await anext(watch) is None
                await written(bucket, "key", b"before")
                leader = await leader_of(them, "KV_bucket")
                os.kill(them.pid(leader), signal.SIGKILL)
                assert await them.ended(leader) == -signal.SIGKILL
                await written(bucket, "key", b"while it is away")
                told: dict[int, bytes] = {}  # the watch goes on, and misses nothing
                while b"while it is away" not in told.values():
                    entry = await anext(watch)
                    assert entry is not None
                    assert entry.revision > max(told, default=0)
                    told[entry.revision] = entry.value
                # A write that was not acknowledged may have happened, and was written again.
                assert list(dict.fromkeys(told.values())) == [b"before", b"while it is away"]
                await them.start_again(leader)
            assert [entry.value for entry in await bucket.entries()] == [b"while it is away"]
        await them.stop()
        await them.start()
        async with bus_to(them) as bus:
            assert await read(await bus.kv("bucket"), "key") == b"while it is away"
    finally:
        await them.stop()


async def test_another_number_of_servers_is_refused(tmp_path: Path) -> None:
    them = servers(tmp_path)
    await them.start()
    await them.stop()
    with pytest.raises(Conflict, match="with 3 nats-servers: start it with as many"):
        await servers(tmp_path, 1).start()
