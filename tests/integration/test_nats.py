"""The bus against a nats-server that crashes, restarts, is missing, too old or hostile."""

import asyncio
import re
import socket
import threading
from contextlib import aclosing
from pathlib import Path

import nats
import pytest

from services.local.credentials import OPERATOR, authorization, make_users
from services.local.nats_server import NatsServer
from shared import subjects
from shared.bus.base import Bus, KvEntry, KvOp, On
from shared.bus.nats import NatsBus
from shared.config import BusConfig
from shared.errors import BusError, BusTimeout, CutOff
from shared.ids import RequestId
from shared.messages import Message, Ok, Ping, encode
from shared.messages.serving import Cancel
from tests.support.fault_proxy import FaultProxy

WAIT_S = 100.0


def numbered(number: int) -> Cancel:
    return Cancel(request=RequestId("r"), attempt=number)


async def echo(message: Message) -> Message:
    return message


async def flood(bus: Bus) -> None:
    for _ in range(10_000):
        await bus.publish("flood", Cancel(request=RequestId("x" * 1000), attempt=0))


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


async def serving_again(bus: Bus, subject: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await bus.request(subject, Ping(), Ok, timeout=1.0)
                return
            except BusError:
                await asyncio.sleep(0.05)


async def test_everything_goes_on_after_the_server_crashed(restartable: NatsServer) -> None:
    heard: asyncio.Queue[Message] = asyncio.Queue()

    async def handler(message: Message) -> None:
        heard.put_nowait(message)

    config = BusConfig(url=restartable.url)
    async with NatsBus(config, "one") as one, NatsBus(config, "two") as two:
        await two.serve("service", Cancel, echo)
        await two.subscribe("subject", On(Message, handler))
        bucket = await one.kv("bucket")
        kept = await bucket.create("kept", b"1")
        changed = await bucket.create("changed", b"1")
        async with aclosing((await two.kv("bucket")).watch()) as watch, asyncio.timeout(WAIT_S):
            assert [await anext(watch) for _ in range(3)] == [
                KvEntry("kept", b"1", kept),
                KvEntry("changed", b"1", changed),
                None,
            ]
            await restartable.kill()
            with pytest.raises(BusError):
                await one.request("service", numbered(0), Cancel, timeout=0.2)
            await restartable.start()
            await serving_again(one, "service")
            changed = await bucket.update("changed", b"2", changed)
            assert await anext(watch) == KvEntry("changed", b"2", changed)
            await bucket.delete("kept")
            gone = await anext(watch)
            assert gone is not None
            assert (gone.key, gone.op) == ("kept", KvOp.DELETE)
            await one.publish("subject", numbered(1))
            assert await heard.get() == numbered(1)


async def test_a_watch_tells_what_ended_while_the_server_was_away(restartable: NatsServer) -> None:
    async with NatsBus(BusConfig(url=restartable.url), "one") as bus:
        bucket = await bus.kv("bucket")
        async with aclosing(bucket.watch()) as watch, asyncio.timeout(WAIT_S):
            assert await anext(watch) is None
            await bucket.create("lease", b"node", ttl=1)
            assert await anext(watch) is not None
            await restartable.kill()
            await asyncio.sleep(1.1)  # the lease ends while nobody could tell
            await restartable.start()
            gone = await anext(watch)
            assert gone is not None
            assert (gone.key, gone.op) == ("lease", KvOp.DELETE)


async def test_a_resumed_watch_tells_what_left_no_marker(nats_server: NatsServer) -> None:
    raw = await nats.connect(nats_server.url)
    async with FaultProxy(port_of(nats_server.url)) as proxy:
        config = BusConfig(url=f"nats://127.0.0.1:{proxy.port}")
        async with NatsBus(config, "far") as far, asyncio.timeout(WAIT_S):
            bucket = await far.kv("bucket")
            await bucket.put("kept", b"1")
            await bucket.put("gone", b"1")
            async with aclosing(bucket.watch()) as watch:
                entries = [await anext(watch) for _ in range(3)]
                assert entries[-1] is None
                await raw.jetstream().purge_stream("KV_bucket", subject="$KV.bucket.gone")
                proxy.drop()
                gone = await anext(watch)
                assert gone is not None
                assert (gone.key, gone.op, gone.value) == ("gone", KvOp.DELETE, b"")
                again = await bucket.put("gone", b"2")
                assert await anext(watch) == KvEntry("gone", b"2", again)
    await raw.close()


async def test_state_survives_a_crash(restartable: NatsServer) -> None:
    async with NatsBus(BusConfig(url=restartable.url), "one") as bus:
        bucket, objects = await bus.kv("bucket"), await bus.objects()
        revision = await bucket.put("key", b"value")
        name = await objects.put(b"asset" * 100_000)
        await restartable.kill()
        await restartable.start()
        assert await bucket.get("key") == KvEntry("key", b"value", revision)
        assert await objects.get(name) == b"asset" * 100_000


async def test_calls_while_the_server_is_away_end_with_an_error(restartable: NatsServer) -> None:
    async with NatsBus(BusConfig(url=restartable.url), "one") as bus:
        bucket = await bus.kv("bucket")
        await restartable.kill()
        with pytest.raises(BusTimeout, match=r"request|service"):
            await bus.request("service", Ping(), Ok, timeout=0.1)
        outcomes = await asyncio.gather(
            bucket.get("key"),
            bucket.put("key", b""),
            bucket.create("key", b""),
            bucket.update("key", b"", 1),
            bucket.delete("key"),
            bucket.entries(),
            bus.kv("another"),
            bus.objects(),
            bus.subscribe("subject", On(Message, lambda _: asyncio.sleep(0))),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [CutOff] * 9


async def test_messages_are_buffered_while_the_server_is_away(restartable: NatsServer) -> None:
    heard: asyncio.Queue[Message] = asyncio.Queue()

    async def handler(message: Message) -> None:
        heard.put_nowait(message)

    async with NatsBus(BusConfig(url=restartable.url), "one") as bus:
        await bus.subscribe("subject", On(Message, handler))
        await restartable.kill()
        with pytest.raises(BusTimeout):
            await bus.request("service", Ping(), Ok, timeout=0.1)
        await bus.publish("subject", numbered(0))
        with pytest.raises(BusError, match="OutboundBufferLimit"):
            await flood(bus)
        await restartable.start()
        async with asyncio.timeout(WAIT_S):
            assert await heard.get() == numbered(0)


async def test_what_is_published_needs_no_other_turn_of_the_loop(nats_server: NatsServer) -> None:
    listens, heard, over = threading.Event(), threading.Event(), threading.Event()

    async def hear(_: Message) -> None:
        heard.set()

    async def listen() -> None:
        async with NatsBus(BusConfig(url=nats_server.url), "other") as other:
            await other.subscribe("subject", On(Message, hear))
            listens.set()
            await asyncio.to_thread(over.wait)

    async with NatsBus(BusConfig(url=nats_server.url), "one") as bus:
        listening = asyncio.create_task(asyncio.to_thread(asyncio.run, listen()))
        try:
            assert await asyncio.to_thread(listens.wait, WAIT_S)
            await bus.publish("subject", numbered(0))
            assert heard.wait(WAIT_S / 10)  # no task of this loop runs meanwhile
        finally:
            over.set()
            await listening


async def test_messages_of_one_turn_keep_their_order(nats_server: NatsServer) -> None:
    """The first is written at once, and the others together."""
    heard: list[Message] = []
    everything = asyncio.Event()

    async def hear(message: Message) -> None:
        heard.append(message)
        if len(heard) == 1000:
            everything.set()

    async with NatsBus(BusConfig(url=nats_server.url), "one") as bus:
        await bus.subscribe("subject", On(Message, hear))
        for number in range(1000):
            await bus.publish("subject", numbered(number))
            if number % 7 == 0:
                await asyncio.sleep(0)
        async with asyncio.timeout(WAIT_S):
            await everything.wait()
    assert heard == [numbered(number) for number in range(1000)]


async def test_a_bus_closes_while_the_server_is_away(restartable: NatsServer) -> None:
    async with asyncio.timeout(WAIT_S):
        async with NatsBus(BusConfig(url=restartable.url), "one") as bus:
            await restartable.kill()
            with pytest.raises(CutOff):
                await bus.request("service", Ping(), Ok, timeout=0.1)


async def test_a_silent_connection_is_noticed(nats_server: NatsServer) -> None:
    async with FaultProxy(port_of(nats_server.url)) as proxy:
        config = BusConfig(url=f"nats://127.0.0.1:{proxy.port}")
        async with NatsBus(config, "far") as far, NatsBus(BusConfig(url=nats_server.url), "near"):
            await far.serve("service", Cancel, echo)
            proxy.silence()
            with pytest.raises(BusTimeout):
                await far.request("service", Ping(), Ok, timeout=0.1)
            await serving_again(far, "service")


async def test_a_short_call_ends_with_its_connection_and_a_long_call_outlives_it(
    nats_server: NatsServer,
) -> None:
    asked, told = asyncio.Event(), asyncio.Event()

    async def slow(message: Message) -> Message:
        asked.set()
        await told.wait()
        return message

    async with FaultProxy(port_of(nats_server.url)) as proxy:
        config = BusConfig(url=f"nats://127.0.0.1:{proxy.port}")
        async with (
            NatsBus(config, "far") as far,
            NatsBus(BusConfig(url=nats_server.url), "near") as near,
            asyncio.TaskGroup() as group,
        ):
            bucket = await far.kv("bucket")
            await near.serve("slow", Cancel, slow)
            await near.serve("service", Cancel, echo)
            long = group.create_task(far.request("slow", numbered(7), Cancel, timeout=WAIT_S))
            await asked.wait()
            with pytest.raises(BusTimeout, match="no answer") as raised:
                await far.request("slow", numbered(8), Cancel, timeout=0.1)
            assert not isinstance(raised.value, CutOff)
            proxy.silence()
            with pytest.raises(CutOff, match="the connection to NATS was lost"):
                await bucket.put("key", b"value")
            await serving_again(far, "service")
            told.set()
            assert await long == numbered(7)


async def test_an_error_unknown_to_the_client_does_not_end_the_bus(nats_server: NatsServer) -> None:
    async with FaultProxy(port_of(nats_server.url)) as proxy:
        config = BusConfig(url=f"nats://127.0.0.1:{proxy.port}")
        async with (
            NatsBus(config, "far") as far,
            NatsBus(BusConfig(url=nats_server.url), "near") as near,
        ):
            await far.serve("service", Cancel, echo)
            bucket = await far.kv("bucket")
            async with aclosing(bucket.watch()) as watch, asyncio.timeout(WAIT_S):
                assert await anext(watch) is None
                proxy.inject(b"-ERR 'Something New'\r\n")
                await proxy.connected(2)
                await serving_again(near, "service")
                revision = await (await near.kv("bucket")).put("key", b"1")
                assert await anext(watch) == KvEntry("key", b"1", revision)


async def test_malformed_messages_are_counted_and_nothing_else(nats_server: NatsServer) -> None:
    heard: asyncio.Queue[Message] = asyncio.Queue()

    async def handler(message: Message) -> None:
        heard.put_nowait(message)

    async with NatsBus(BusConfig(url=nats_server.url), "one") as bus:
        await bus.subscribe("subject", On(Message, handler))
        await bus.serve("service", Cancel, echo)
        raw = await nats.connect(nats_server.url)
        for junk in (b"", b"\xc1", b"\x80", encode(Ok())[:-1], b"\x81\xa4kind\xa4what"):
            await raw.publish("subject", junk)
        answer = await raw.request("service", b"junk", timeout=WAIT_S)
        assert b"bad_message" in answer.data
        await raw.publish("subject", encode(numbered(1)))
        async with asyncio.timeout(WAIT_S):
            assert await heard.get() == numbered(1)
        assert bus.rejected == 6
        await raw.close()


async def test_no_server_is_a_clear_error(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "nats") as server:
        url = server.url
    with pytest.raises(BusError, match=re.escape(f"no NATS server at {url} within 0.3 s")):
        async with NatsBus(BusConfig(url=url, connect_timeout_s=0.3), "one"):
            pass


async def test_a_server_that_says_nothing_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"nats://127.0.0.1:{silent.getsockname()[1]}"
        complaint = f"no NATS server at {url} within 0.3 s: start one, or set"
        with pytest.raises(BusError, match=re.escape(complaint)):
            await NatsBus(BusConfig(url=url, connect_timeout_s=0.3), "one").__aenter__()


async def test_a_bus_waits_for_a_server_that_starts_late(tmp_path: Path) -> None:
    directory = tmp_path / "nats"
    async with NatsServer(directory) as first:
        port = port_of(first.url)
    bus = NatsBus(BusConfig(url=f"nats://127.0.0.1:{port}", connect_timeout_s=WAIT_S), "early")
    opening = asyncio.ensure_future(bus.__aenter__())
    async with NatsServer(directory, port=port):
        await opening
        await bus.publish("subject", Ok())
        await bus.__aexit__(None, None, None)


async def test_credentials_are_asked_for(tmp_path: Path) -> None:
    keys = make_users(tmp_path / "ours", [OPERATOR])
    make_users(tmp_path / "others", [OPERATOR])
    only_ours = {"authorization": authorization(keys)}
    async with NatsServer(tmp_path / "nats", settings=only_ours) as server:
        good = BusConfig(url=server.url, credentials=str(tmp_path / "ours" / "operator"))
        async with NatsBus(good, "good") as bus:
            await bus.publish(subjects.POOL_REPORT, Ok())
        for credentials in ("", str(tmp_path / "others" / "operator")):
            bad = BusConfig(url=server.url, credentials=credentials)
            with pytest.raises(BusError, match=r"refuses .*: set bus\.credentials to"):
                async with NatsBus(bad, "bad"):
                    pass


async def test_a_bucket_that_cannot_expire_keys_is_refused(nats_server: NatsServer) -> None:
    raw = await nats.connect(nats_server.url)
    await raw.jetstream().create_key_value(bucket="old")
    await raw.close()
    async with NatsBus(BusConfig(url=nats_server.url), "one") as bus:
        with pytest.raises(BusError, match="expiry"):
            await bus.kv("old")


async def test_a_watched_bucket_that_is_deleted_is_an_error(restartable: NatsServer) -> None:
    async with NatsBus(BusConfig(url=restartable.url), "one") as bus:
        bucket = await bus.kv("bucket")
        async with aclosing(bucket.watch()) as watch, asyncio.timeout(WAIT_S):
            assert await anext(watch) is None
            raw = await nats.connect(restartable.url)
            await raw.jetstream().delete_key_value("bucket")
            await raw.close()
            with pytest.raises(BusError, match="gone"):
                await anext(watch)


async def test_a_corrupt_object_is_an_error(nats_server: NatsServer) -> None:
    async with NatsBus(BusConfig(url=nats_server.url), "one") as bus:
        objects = await bus.objects()
        name = await objects.put(b"true")
        raw = await nats.connect(nats_server.url)
        store = await raw.jetstream().object_store(subjects.OBJECTS)
        await store.put(name, b"false")
        await raw.close()
        with pytest.raises(BusError, match="does not match"):
            await objects.get(name)
