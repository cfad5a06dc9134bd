"""The gateway process: HTTP on one side, the control bus on the other."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, ClassVar

from aiohttp import web

from services.gateway.books import Books
from services.gateway.catalog import Catalog
from services.gateway.connections import Connections
from services.gateway.core.dispatch import Dispatch
from services.gateway.core.ledger import Rules
from services.gateway.core.reporting import Reporting
from services.gateway.core.routing import OURS, Routing
from services.gateway.failures import go_on
from services.gateway.frontend import Frontend
from services.gateway.grammars import GrammarChecker
from services.gateway.health import Health
from services.gateway.http.app import Api
from services.gateway.http.server_log import SERVER_LOG
from services.gateway.keyed_answers import KeyedAnswers
from services.gateway.keyring import Keyring
from services.gateway.lease import GatewayLease
from services.gateway.lookout import Lookout
from services.gateway.metrics import Metrics
from services.gateway.picker import PickerPage
from services.gateway.planner_link import PlannerLink
from services.gateway.prompts import PromptReader
from services.gateway.tls import load_tls
from services.gateway.usage_log import FLUSH_S, UsageLog
from shared import subjects
from shared.bus.base import Bus, On, Subscription
from shared.clock import now, wall_ns
from shared.config import GatewayConfig
from shared.confined.pool import ConfinedPool
from shared.errors import ConfigError, LambdaScaleError
from shared.ids import GatewayId, ModelId, ModelName, check_name, new_id
from shared.known_tokens import TOKENS
from shared.messages.access import AccessPage, AccessQuery
from shared.messages.load import WHOLE_S, GatewayLoad
from shared.messages.pool import (
    ModelAdded,
    ModelRecord,
    ModelRemoved,
    Models,
    ModelsQuery,
    NodeGone,
    Task,
)
from shared.messages.serving import Tokens
from shared.messages.story import StoryQuery, Told
from shared.metrics import Metrics as Families
from shared.service import Service

LOAD_S = 0.1
"""Seconds between load reports while the load changes."""
ONSET_S = 0.005
"""The least number of seconds between two load reports."""
TICK_S = 0.05
"""Seconds between looks at what has to happen with time, while there are requests."""
IDLE_TICK_S = 0.5
"""The same while there are none."""
LEARN_S = 0.2
"""Seconds between questions to the registry, until it has answered once."""
ACCESS_S = 0.4
"""Seconds between questions to the registry which tenants and keys have changed."""
REFRESH_S = 5.0
"""Seconds between questions to the registry after that. A broadcast may have been missed."""
ASK_TIMEOUT_S = 2.0
LINGER_S = 1.0
"""How long the rest of a body is awaited after its request was answered without it."""
BACKLOG = 1024
"""Connections that wait to be accepted."""
STALL_S = 30.0
"""See `Rules.stall_s`."""
BUS_PATIENCE_S = 5.0
"""New requests are refused once the bus is away for longer than this. NATS restarts in less."""
HANG_UP_S = 0.5
"""Seconds that connections have after the drain to take their last bytes."""


class GatewayService(Service):
    role: ClassVar[str] = "gateway"
    dispatch_type: ClassVar[type[Dispatch]] = Dispatch
    answers_type: ClassVar[type[KeyedAnswers]] = KeyedAnswers

    def __init__(
        self,
        bus: Bus,
        config: GatewayConfig,
        *,
        listen: bool = True,
        routing: Routing = OURS,
    ) -> None:
        """`listen`: whether to serve HTTP. Otherwise requests come in through `frontend` only."""
        super().__init__(check_name("gateway.name", config.name))
        self._bus = bus
        self._config = config
        rules = Rules(
            draw=random.Random(new_id("draws")).random,
            max_queue=config.max_queue,
            queue_timeout_s=config.queue_timeout_s,
            stall_s=STALL_S,
            max_attempts=config.max_attempts,
            routing=routing,
            check_s=config.check_s,
        )
        self._dispatch = self.dispatch_type(rules)
        self._metrics = Metrics(
            lambda: self._dispatch.loads(self._zero_ns), self._dispatch.breakers
        )
        self.frontend = Frontend(
            bus, self._dispatch, self._metrics, self._start, self.contain, self.log
        )
        self._keyed = self.answers_type(
            bus, config, self._start, self.contain, self.log, lambda: self.id
        )
        self.url = ""
        """The URL at which HTTP is served. Empty until it is."""
        self._listen = listen
        self._keyring = Keyring(config.api_keys)
        self._usage = UsageLog(bus, self._metrics, self.log)
        self._confined = ConfinedPool()
        """Where foreign code runs: templates of models, grammars of clients."""
        self._api: Api | None = None
        self._lease: GatewayLease
        self._heard: list[Subscription] = []
        """What comes to this gateway's id."""
        self._reporting = Reporting(WHOLE_S, wall_ns() // 1_000_000)
        self._news = True
        """Whether the last load report said anything of a model."""
        self._zero_ns = 0
        """What the wall clock showed at time 0 of the loop."""
        self._up_at = -math.inf
        """When the bus was last seen connected."""
        self._lookout = Lookout(bus, self._dispatch, self._usage.latencies, lambda: self.id)
        self._planner = PlannerLink(bus, self._dispatch, self.frontend, self.log)
        self._registry_at = -math.inf
        """When the registry was last heard."""
        self._draining = False

    def metrics(self) -> Families:
        return self._metrics.families

    async def open(self) -> None:
        self._zero_ns = wall_ns() - round(now() * 1e9)
        self._catalog = Catalog(await self._bus.objects())
        bus = self._bus
        models = On(ModelAdded, self._on_added), On(ModelRemoved, self._on_removed)
        self.own(await bus.subscribe(subjects.POOL_MODELS, *models))
        self.own(await bus.subscribe(subjects.POOL_NODES, On(NodeGone, self._on_gone)))
        self.own(await self._planner.follow())
        loads = On(GatewayLoad, self.frontend.on_load)
        self.own(await bus.subscribe(subjects.LOAD_GATEWAY, loads))
        self._lease = GatewayLease(await bus.kv(subjects.KV_GATEWAYS), self.name, self.log)
        await self._lease.take()
        self.resources.push_async_callback(self._lease.release)
        self.resources.push_async_callback(self._close_heard)
        await self._take_id()
        self.spawn(self._lease.keep(self._take_id), name="lease")
        # When this service ends it cuts off streams. Nodes must not go on working for these.
        self.resources.push_async_callback(self.frontend.withdrawn)
        if self._listen:
            await self._open_http()
        for name, step in (
            ("models", self._learn_models),
            ("instances", self._planner.learn),
            ("tick", self._tick),
            ("load", self._report),
        ):
            self._go_on(name, step)

    def _go_on(self, name: str, step: Callable[[], Awaitable[float | None]]) -> None:
        self.spawn(go_on(step, self.contain, self.log, name), name=name)

    @property
    def id(self) -> GatewayId:
        """The gateway's id on the bus, which is this process's alone. It may change."""
        return self._lease.id

    async def _take_id(self) -> None:
        """Listens under the id that the lease gave, and no longer under an earlier one."""
        await self._close_heard()
        tokens = On(Tokens, self.frontend.on_tokens)
        subject = subjects.gateway_tokens(self.id)
        self._heard.append(await self._bus.subscribe(subject, tokens))
        subject = subjects.gateway_story(self.id)
        self._heard.append(await self._bus.serve(subject, StoryQuery, self._story))
        self.frontend.run(self._dispatch.take_id(self.id, now()))

    async def _close_heard(self) -> None:
        while self._heard:
            await self._heard.pop().close()

    async def _open_http(self) -> None:
        config = self._config
        self.resources.push_async_callback(self._confined.close)
        await self._keyed.open()
        books = Books(self._bus, self._usage, lambda: self.id, self._catalog.kv_bytes)
        self.own(await books.open())
        await self._usage.open()
        self.resources.push_async_callback(self._write_usage)
        self._go_on("access", self._learn_access)
        self._go_on("books", books.tell)
        self._go_on("usage", self._write_usage)
        connections = Connections(
            config.max_connections,
            config.max_connections_per_client,
            config.client_timeout_s,
            refused=self._metrics.refused_connections.inc,
        )
        self._go_on("past", self._lookout.ask_planner)
        self._go_on("pool", self._lookout.ask_registry)
        self._metrics.connections = connections.__len__
        self._api = api = Api(
            config,
            connections,
            self._keyring,
            books,
            self._catalog,
            PromptReader(self._confined),
            GrammarChecker(self._confined),
            self.frontend,
            self._metrics,
            PickerPage(self._dispatch.pressure, lambda: self._catalog.records).families,
            self._keyed,
            self._lookout,
            self.log,
            connected=self._connected,
            health=self._health,
        )
        # A client that leaves cancels its handler, and the handler its requests.
        runner = web.AppRunner(
            api.app(),
            handler_cancellation=True,
            access_log=None,
            logger=SERVER_LOG,
            shutdown_timeout=HANG_UP_S,
            lingering_time=LINGER_S,
        )
        await runner.setup()
        assert runner.server is not None
        self.resources.push_async_callback(runner.cleanup)
        tls = load_tls(config.tls_certificate, config.tls_key)
        try:
            server = await asyncio.get_running_loop().create_server(
                connections.protocols(runner.server),
                config.host,
                config.port,
                backlog=BACKLOG,
                reuse_port=config.share_port,
                ssl=tls,
                ssl_handshake_timeout=config.client_timeout_s if tls else None,
            )
        except OSError as error:
            where = f"{config.host}:{config.port}"
            raise ConfigError(f"gateway.host/port {where} cannot be used: {error}") from error
        self.resources.callback(server.close)
        host, port = server.sockets[0].getsockname()[:2]
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        self.log.info("serving", url=self.url)

    async def drain(self) -> None:
        """Refuses new requests, and waits until those that run have ended."""
        self._draining = True
        if self._api is not None:
            self._api.drain()
        await self.frontend.idle()

    def _connected(self) -> bool:
        return self._bus.is_up or now() - self._up_at < BUS_PATIENCE_S

    def _health(self) -> Health:
        at = now()
        return Health(
            bus=self._connected(),
            registry_s=at - self._registry_at,
            planner_s=at - self._planner.heard_at,
            models=len(self._catalog.records),
            served=self._dispatch.served,
            draining=self._draining,
        )

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self.spawn(work, name=name)

    # --- models --------------------------------------------------------------

    async def _on_added(self, message: ModelAdded) -> None:
        self._add(message.record)

    async def _on_removed(self, message: ModelRemoved) -> None:
        self._remove(message.name, message.model_id)

    async def _learn_models(self) -> float:
        subject = subjects.REGISTRY_MODELS
        try:
            models = await self._bus.request(subject, ModelsQuery(), Models, timeout=ASK_TIMEOUT_S)
        except LambdaScaleError as error:
            self.log.debug("registry does not answer", error=str(error))
        else:
            self._registry_at = now()
            self._reconcile(models.records)
            if not models.keeps_access:
                self._keyring.known = True
        return REFRESH_S if self._catalog.known else LEARN_S

    async def _learn_access(self) -> float:
        query = AccessQuery(since=self._keyring.revision)
        try:
            page = await self._bus.request(
                subjects.REGISTRY_ACCESS, query, AccessPage, timeout=ASK_TIMEOUT_S
            )
        except LambdaScaleError as error:
            self.log.debug("registry does not say who may call", error=str(error))
        else:
            self._keyring.take(page)
            if page.more or page.revision < query.since:
                return 0.0
        return ACCESS_S if self._keyring.known else LEARN_S

    async def _write_usage(self) -> float:
        await self._usage.flush(self.id)
        return FLUSH_S

    def _reconcile(self, records: tuple[ModelRecord, ...]) -> None:
        there = {record.model_id for record in records}
        for record in list(self._catalog.records.values()):
            if record.model_id not in there:
                self._remove(record.name, record.model_id)
        for record in records:
            self._add(record)
        self._catalog.known = True

    def _add(self, record: ModelRecord) -> None:
        known = self._catalog.records.get(record.name)
        if known == record:
            return
        if known is not None and known.model_id != record.model_id:
            self._remove(known.name, known.model_id)
        self._catalog.records[record.name] = record
        if record.base:
            return  # instances and files are its base's
        generates = record.task is Task.TEXT and not record.embeds
        checked = generates and record.context_length > len(TOKENS)
        self._dispatch.add_model(record.name, record.model_id, checked)
        if self._listen:
            name = f"prefetch {record.name}"
            self.spawn(self._prefetch(record), name=name, contained=True)

    def _remove(self, name: ModelName, model_id: ModelId) -> None:
        self._catalog.remove(name, model_id)
        self._metrics.forget(name)
        self.frontend.run(self._dispatch.remove_model(model_id, now()))

    async def _prefetch(self, record: ModelRecord) -> None:
        """Loads the model's files, so that its first request need not wait for them. If that fails,
        the first request tries again."""
        try:
            await self._catalog.load(record)
        except LambdaScaleError as error:
            self.log.warning("model's files not loaded", model=record.name, error=str(error))

    async def _on_gone(self, message: NodeGone) -> None:
        self.frontend.run(self._dispatch.on_node_gone(message.node, now(), message.graceful))

    async def _story(self, query: StoryQuery) -> Told:
        steps = (*self._dispatch.story(query.subject), *self._keyed.story(query.subject))
        return Told.of(sorted(steps, key=lambda step: step.at), now(), wall_ns())

    # --- time and load -------------------------------------------------------

    async def _tick(self) -> float:
        if self._bus.is_up:
            self._up_at = now()
        self.frontend.run(self._dispatch.on_tick(now()))
        await self._busy(within_s=IDLE_TICK_S - TICK_S)
        return TICK_S

    async def _report(self) -> float:
        """Reports the load: every `LOAD_S` while it changes, every `WHOLE_S` while it does not,
        and at once when requests begin to wait (but `ONSET_S` after the last report)."""
        if not self._news:
            await self._busy(within_s=WHOLE_S - LOAD_S + ONSET_S)
        pressing = self.frontend.pressing
        await _set_within(pressing, LOAD_S - ONSET_S)
        pressing.clear()
        loads = self._dispatch.loads(self._zero_ns)
        message = self._reporting.next(self.id, self.url, loads, now(), self._zero_ns)
        self._news = message is not None and bool(message.models)
        if message is not None:
            await self._bus.publish(subjects.LOAD_GATEWAY, message)
        return ONSET_S

    async def _busy(self, within_s: float) -> None:
        """Waits until there are requests, for `within_s` seconds at most."""
        await _set_within(self.frontend.busy, within_s)


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Waits for the event, `seconds` at most. `asyncio.wait_for` is not used, because before Python
    3.12 it loses a cancellation that comes together with the event, and the task goes on for
    ever."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
