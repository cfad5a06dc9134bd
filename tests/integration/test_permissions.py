"""Each role's credentials, on a real nats-server, against every subject that it must not touch."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
import structlog

from services.local.credentials import User, all_users, authorization, make_users
from services.local.nats_server import NatsServer
from services.node.lease import Lease
from shared import subjects, telemetry
from shared.bus.base import On
from shared.bus.credentials import read_credentials
from shared.bus.nats import NatsBus
from shared.config import BusConfig
from shared.errors import BusError, NotPermitted
from shared.ids import GatewayId, Generation, NodeId
from shared.messages import Message, Ok, Ping
from shared.messages.pool import NodeInfo
from shared.permissions import (
    ASSETS_READ,
    ASSETS_WRITTEN,
    BUCKETS,
    LOGS,
    TOPICS,
    Role,
    inbox_of,
)

N1, N2 = NodeId("n1"), NodeId("n2")
USERS = all_users([N1, N2])
STREAMS = [
    *(f"KV_{bucket.name}" for bucket in BUCKETS),
    f"OBJ_{subjects.OBJECTS}",
    *(f"LOG_{log.name}" for log in LOGS),
]
CHANGES = (
    "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.MSG.DELETE", "STREAM.SNAPSHOT",
    "STREAM.RESTORE", "DIRECT.GET", "CONSUMER.DURABLE.CREATE", "CONSUMER.MSG.NEXT",
)  # fmt: skip
WIDE = {">", "ls.>", "ls.node.>", "ls.node.*.submit", "_INBOX.>", "$JS.>", "$KV.>", "$SYS.>"}
VIOLATION = re.compile('permissions violation for (publish|subscription) to "([^"]*)"')


class Cluster:
    def __init__(self, server: NatsServer, directory: Path) -> None:
        self._server = server
        self._directory = directory

    def config(self, user: User) -> BusConfig:
        return BusConfig(url=self._server.url, credentials=str(self._directory / user.directory))

    def inbox(self, user: User) -> str:
        return inbox_of(read_credentials(self._directory / user.directory).key)

    async def refused(
        self, user: User, publish: set[str], subscribe: set[str]
    ) -> tuple[set[str], set[str]]:
        """Which of these NATS refuses to the user."""
        found: dict[str, set[str]] = {"publish": set(), "subscription": set()}

        async def on_error(error: Exception) -> None:
            violation = VIOLATION.search(str(error))
            assert violation, error
            found[violation[1]].add(violation[2])

        async def hear(message: Any) -> None:
            pass

        credentials = read_credentials(self._directory / user.directory)
        client = await nats.connect(
            self._server.url, nkeys_seed_str=credentials.seed, error_cb=on_error
        )
        for subject in sorted(subscribe):
            await client.subscribe(subject, cb=hear)
        for subject in sorted(publish):
            await client.publish(subject, b"")
        await client.flush()
        await client.flush()
        await client.close()
        return found["publish"], found["subscription"]

    async def publish(self, user: User, subject: str, headers: dict[str, str]) -> None:
        """Returns once the stream has it."""
        credentials = read_credentials(self._directory / user.directory)
        client = await nats.connect(
            self._server.url,
            nkeys_seed_str=credentials.seed,
            inbox_prefix=inbox_of(credentials.key),
        )
        await client.request(subject, b"", headers=headers, timeout=60.0)
        await client.close()


@asynccontextmanager
async def cluster(directory: Path) -> AsyncIterator[Cluster]:
    keys = make_users(directory / "credentials", USERS)
    settings = {"authorization": authorization(keys)}
    async with NatsServer(directory / "nats", settings=settings) as server:
        yield Cluster(server, directory / "credentials")


@dataclass
class Tried:
    """Subjects that a user tries, and those that its role needs."""

    all: set[str] = field(default_factory=set)
    needed: set[str] = field(default_factory=set)

    def add(self, subject: str, needed: bool = False) -> None:
        self.all.add(subject)
        if needed:
            self.needed.add(subject)

    @property
    def foreign(self) -> set[str]:
        """As nats-py reports them."""
        return {subject.lower() for subject in self.all - self.needed}


def topics(user: User) -> tuple[Tried, Tried]:
    """What is said, and what is heard."""
    said, heard = Tried(), Tried(set(WIDE))
    for topic in TOPICS:
        for node in (N1, N2):
            subject = topic.subject.replace(".node.*.", f".node.{node}.").replace("*", "x")
            own = ".node." not in topic.subject or user.node in (None, node)
            said.add(subject, needed=user.role in topic.says)
            heard.add(subject, needed=user.role in topic.hears and own)
    return said, heard


def on_stores(user: User, said: Tried) -> None:
    for bucket in BUCKETS:
        stream = f"KV_{bucket.name}"
        reads = bucket.gets | bucket.lists | bucket.writes.keys()
        said.add(f"$JS.API.STREAM.MSG.GET.{stream}", needed=user.role in reads)
        said.add(f"$JS.API.CONSUMER.CREATE.{stream}", needed=user.role in bucket.lists)
        own = bucket.writes.get(user.role, "").replace("*", user.node or "*")
        for key in ("n1", "n2", "node.n1", "node.n2", "registry", "planner"):
            said.add(f"$KV.{bucket.name}.{key}", needed=own in (">", key))
    assets = f"OBJ_{subjects.OBJECTS}"
    said.add(f"$JS.API.STREAM.MSG.GET.{assets}", needed=user.role in ASSETS_READ)
    said.add(f"$JS.API.CONSUMER.CREATE.{assets}")
    said.add(f"$O.{subjects.OBJECTS}.M.x", needed=user.role in ASSETS_WRITTEN)
    for log in LOGS:
        said.add(f"$LOG.{log.name}", needed=user.role in log.appends)
        said.add(f"$JS.API.STREAM.MSG.GET.LOG_{log.name}")
        making = f"$JS.API.CONSUMER.CREATE.LOG_{log.name}"
        said.add(making, needed=user.role in log.reads)
    for subject in ("$SYS.REQ.SERVER.PING", "anything.else"):
        said.add(subject)
    for change in CHANGES:
        for stream in STREAMS:
            said.add(f"$JS.API.{change}.{stream}")


@pytest.mark.parametrize("user", USERS, ids=lambda user: user.directory)
async def test_a_user_may_say_and_hear_what_its_role_needs_and_nothing_else(
    user: User, tmp_path: Path
) -> None:
    said, heard = topics(user)
    on_stores(user, said)
    async with cluster(tmp_path) as there:
        for other in USERS:
            heard.add(f"{there.inbox(other)}.x", needed=other == user)
        refused = await there.refused(user, said.all, heard.all)
    assert refused == (said.foreign, heard.foreign)


async def test_what_nats_does_not_permit_is_an_error_at_once_and_is_logged(tmp_path: Path) -> None:
    async def hear(message: Message) -> None:
        pass

    async with cluster(tmp_path) as there:
        with structlog.testing.capture_logs() as logs:
            async with NatsBus(there.config(User(Role.GATEWAY)), "gateway") as bus:
                with pytest.raises(NotPermitted, match="registry"):
                    await bus.request(subjects.REGISTRY_MODEL_REMOVE, Ping(), Ok, timeout=60.0)
                with pytest.raises(NotPermitted, match="plan"):
                    await bus.subscribe(subjects.node_plan(N1), On(Message, hear))
                with pytest.raises(NotPermitted, match="ls_models"):
                    await bus.kv(subjects.KV_MODELS)
                with pytest.raises(NotPermitted, match="ls_gateways"):
                    await (await bus.kv(subjects.KV_GATEWAYS)).entries()
                await bus.publish(subjects.INSTANCES, Ok())  # which nobody waits for
                await bus.kv(subjects.KV_ANSWERS)  # by now NATS has answered it
        refused = {log["subject"] for log in logs if log["event"] == "NATS does not permit this"}
    assert refused >= {
        subjects.REGISTRY_MODEL_REMOVE,
        subjects.node_plan(N1),
        subjects.INSTANCES,
        f"$js.api.stream.info.kv_{subjects.KV_MODELS}",
        f"$js.api.consumer.create.kv_{subjects.KV_GATEWAYS}",
    }
    assert {log["log_level"] for log in logs if log["event"] == "NATS does not permit this"} == {
        "error"
    }


async def test_a_node_answers_requests_and_cannot_answer_for_another(tmp_path: Path) -> None:
    """It may answer what it was asked, once. It knows the prefix of the asker's inbox then."""

    async def pong(message: Ping) -> Message:
        return Ok()

    async with (
        cluster(tmp_path) as there,
        NatsBus(there.config(User(Role.NODE, N1)), "n1") as node,
        NatsBus(there.config(User(Role.GATEWAY)), "gateway") as gateway,
    ):
        await node.serve(subjects.node_ping(N1), Ping, pong)
        await gateway.request(subjects.node_ping(N1), Ping(), Ok, timeout=60.0)
        inbox = f"{there.inbox(User(Role.GATEWAY))}.guessed"
        refused, _ = await there.refused(User(Role.NODE, N1), {inbox}, set())
        assert refused == {inbox.lower()}
        with pytest.raises(BusError, match="nobody answers"):
            await gateway.request(subjects.node_ping(N2), Ping(), Ok, timeout=60.0)
        await gateway.subscribe(subjects.gateway_tokens(GatewayId("g")), On(Ok, _nothing))


async def test_leases_that_a_node_has_erased_are_back_at_once(tmp_path: Path) -> None:
    """NATS has no bucket whose keys expire and that takes no rollup. So a node's user can erase
    all leases; but each node finds that out when it renews its own, and goes on as it was."""
    async with (
        cluster(tmp_path) as there,
        NatsBus(there.config(User(Role.REGISTRY)), "registry") as registry,
        NatsBus(there.config(User(Role.NODE, N1)), "n1") as n1,
        NatsBus(there.config(User(Role.NODE, N2)), "n2") as n2,
    ):
        leases = await registry.kv(subjects.KV_LEASES)
        await registry.kv(subjects.KV_COUNTERS)
        held = await lease_of(n2, N2)
        await held.take()
        await (await lease_of(n1, N1)).take()
        await there.publish(
            User(Role.NODE, N1), f"$KV.{subjects.KV_LEASES}.{N1}", {"Nats-Rollup": "all"}
        )
        assert await leases.get(N2) is None, "that much it can do"
        keeping = asyncio.create_task(held.keep())
        async with asyncio.timeout(60.0), aclosing(leases.watch()) as changes:
            while (entry := await anext(changes)) is None or entry.key != N2:
                pass
        keeping.cancel()
        assert msgspec.msgpack.decode(entry.value, type=NodeInfo) == held.info


async def lease_of(bus: NatsBus, node: NodeId) -> Lease:
    info = NodeInfo(
        node=node,
        generation=Generation(1),
        address="tcp://127.0.0.1:1",
        host="h",
        device="cpu",
        arena_bytes=1,
        link_bytes_per_s=0,
        slots=1,
    )
    leases, counters = await bus.kv(subjects.KV_LEASES), await bus.kv(subjects.KV_COUNTERS)
    return Lease(leases, counters, info, 10, telemetry.logger("test"))


async def _nothing(message: Ok) -> None:
    pass
