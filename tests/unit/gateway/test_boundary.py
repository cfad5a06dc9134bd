"""Whatever one model, message or dependency does wrong, the gateway goes on serving the others."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from inspect import iscoroutinefunction
from typing import Any

import aiohttp
import msgspec
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.answers import Answers
from services.gateway.core.dispatch import Dispatch
from services.gateway.core.model import Model
from services.gateway.frontend import Frontend
from services.gateway.grammars import GrammarChecker
from services.gateway.text import DecodeStream, TextCodec
from shared import subjects
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.config import GatewayConfig
from shared.confined.pool import ConfinedPool
from shared.errors import CapacityExceeded
from shared.ids import InstanceId, ModelId, ModelName, NodeId, RequestId
from shared.messages import Message
from shared.messages.instances import InstanceChange, InstanceSet, InstanceState
from shared.messages.pool import ModelAdded, ModelRecord, ModelRemoved, NodeGone
from shared.messages.serving import Tokens
from shared.messages.story import StoryQuery, Told
from tests.support.malformed import ERRORS, STRANGE_TEXTS, well_framed
from tests.unit.gateway.reader import ASK, TEXT, Reader, nodes_of
from tests.unit.gateway.support import PATIENCE_S, Cluster, replica, running, text_files

ODD = ModelName("odd")
ODD_ID = ModelId(f"id-of-{ODD}")
ODD_NODE = NodeId("node-2")
BRIEF = GatewayConfig(max_attempts=0, queue_timeout_s=0.2)
"""What fails fails at once."""
BUGS = [error for error in ERRORS if isinstance(error, Exception)]
"""Not what only an await can raise."""


class Faulty:
    """Raises in calls that the condition holds for, while it is given an error."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.raised = 0
        self.now = asyncio.Event()
        """It raised, since this was cleared."""

    def inject(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: type,
        method: str,
        condition: Callable[..., bool] = lambda *_: True,
    ) -> None:
        original = getattr(owner, method)

        def fail(*args: Any) -> None:
            if self.error is not None and condition(*args):
                self.raised += 1
                self.now.set()
                raise self.error

        def call(*args: Any, **kwargs: Any) -> Any:
            fail(*args)
            return original(*args, **kwargs)

        async def wait(*args: Any, **kwargs: Any) -> Any:
            fail(*args)
            return await original(*args, **kwargs)

        monkeypatch.setattr(owner, method, wait if iscoroutinefunction(original) else call)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of tracebacks take minutes to print."""
    with structlog.testing.capture_logs():
        yield


@pytest.fixture
def faulty() -> Faulty:
    return Faulty()


@asynccontextmanager
async def two_models(
    buses: tuple[MemoryBus, MemoryBus] | None = None,
) -> AsyncIterator[tuple[Cluster, ModelRecord]]:
    """The sound one on node 1, the odd one on node 2."""
    async with running(replica(1), config=BRIEF, buses=buses or ()) as cluster:
        record = await cluster.store_model(name=ODD)
        await cluster.add(record)
        await cluster.publish(replica(2), record=record)
        await nodes_of(cluster, 1, 2, pause_at=None)
        await cluster.until(lambda: len(cluster.loads[-1].models) == 2)
        yield cluster, record


async def ask_odd(cluster: Cluster, route: str = "completions", **change: object) -> int:
    """Its status; 0 if there was no answer."""
    chat = {"model": ODD, "messages": [{"role": "user", "content": "hi"}]}
    body = {**(chat if "chat" in route else {**ASK, "model": ODD}), **change}
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as http:
        try:
            async with http.post(f"{cluster.service.url}/v1/{route}", json=body) as response:
                await response.read()
                return response.status
        except aiohttp.ClientError:
            return 0


async def the_sound_one_answers(cluster: Cluster) -> None:
    async with asyncio.timeout(PATIENCE_S):
        assert await Reader(cluster).read() == TEXT


# --- exceptions ---------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["apply", "dispatch", "tick", "accept", "leave", "node_gone", "not_done"]
)
async def test_a_bug_in_the_core_ends_the_requests_of_its_model_only(
    monkeypatch: pytest.MonkeyPatch, faulty: Faulty, method: str
) -> None:
    faulty.inject(monkeypatch, Model, method, lambda model, *_: model.name == ODD)
    async with two_models() as (cluster, record):
        nodes = await nodes_of(cluster, 1, 2, pause_at=None)
        for error in BUGS[:: len(BUGS) // 5]:
            for node in nodes:
                node.pause_at = 10
                node.resume.clear()
            async with asyncio.TaskGroup() as group:
                sound, odd = Reader(cluster), Reader(cluster, {"model": ODD, "stop": "over"})
                reading = group.create_task(sound.read())
                group.create_task(odd.read())
                await sound.until(10)
                await odd.until(10)
                faulty.error = error
                await cluster.publish(replica(2), replica(3), record=record)
                await cluster.lose(3)
                nodes[1].refusal = CapacityExceeded("full")
                await ask_odd(cluster)
                for node in nodes:
                    node.resume.set()
                assert await reading == TEXT
            faulty.error = nodes[1].refusal = None
            await cluster.publish(replica(2), record=record)
            for node in nodes:
                node.pause_at = None
            assert await Reader(cluster, {"model": ODD}).read() == TEXT
    assert faulty.raised


@pytest.mark.parametrize(
    ("owner", "method", "route", "change"),
    [
        (ConfinedPool, "run", "chat/completions", {}),
        (TextCodec, "encode_prompts", "completions", {}),
        (DecodeStream, "step", "completions", {}),
        (Answers, "whole", "completions", {}),
        (Answers, "events", "completions", {"stream": True}),
        (Answers, "last", "completions", {"stream": True}),
        (
            GrammarChecker,
            "check",
            "completions",
            {"structured_outputs": {"regex": "a"}},
        ),
        (Dispatch, "admit", "completions", {}),
        (Frontend, "finish", "completions", {"stop": "quick"}),
    ],
)
async def test_an_error_in_a_handler_is_its_request_s(
    monkeypatch: pytest.MonkeyPatch,
    faulty: Faulty,
    owner: type,
    method: str,
    route: str,
    change: dict[str, object],
) -> None:
    faulty.inject(monkeypatch, owner, method)
    async with two_models() as (cluster, _):
        for error in ERRORS:
            faulty.error = error
            status = await ask_odd(cluster, route, **change)
            assert status == 0 or status >= 400 or change.get("stream")
            faulty.error = None
            assert await ask_odd(cluster, route) == 200
        assert faulty.raised >= len(ERRORS)
        await the_sound_one_answers(cluster)


async def test_a_stream_that_breaks_says_so(
    monkeypatch: pytest.MonkeyPatch, faulty: Faulty
) -> None:
    faulty.inject(
        monkeypatch, __import__("services.gateway.answers", fromlist=["Answers"]).Answers, "last"
    )
    faulty.error = ZeroDivisionError("a secret")
    async with two_models() as (cluster, _):
        reader = Reader(cluster)
        assert await reader.read() == TEXT
        assert reader.error
        assert reader.error["type"] == "server_error"
        assert b"a secret" not in reader.raw
        assert reader.raw.endswith(b"data: [DONE]\n\n")


async def test_files_that_cannot_be_read_are_their_model_s(
    monkeypatch: pytest.MonkeyPatch, faulty: Faulty
) -> None:
    """Where they are fetched ahead as where a request needs them."""
    async with two_models() as (cluster, _):
        owner = type(cluster.service._catalog._objects)
        faulty.inject(monkeypatch, owner, "get")
        for number, error in enumerate(ERRORS):
            faulty.error = error
            record = await cluster.store_model(name=ModelName(f"bad-{number}"))
            await cluster.add(record)
            name = record.name
            await cluster.until(lambda: name in {m.model for m in cluster.loads[-1].models})  # noqa: B023
            assert await ask_odd(cluster) == 200
        assert faulty.raised >= len(ERRORS)
        await the_sound_one_answers(cluster)


@pytest.mark.parametrize("subject", ["submit", "cancel", "models", "load"])
async def test_the_gateway_outlives_its_bus(
    monkeypatch: pytest.MonkeyPatch, faulty: Faulty, subject: str
) -> None:
    monkeypatch.setattr("services.gateway.failures.AFTER_FAILURE_S", 0.01)
    monkeypatch.setattr("services.gateway.service.REFRESH_S", 0.01)
    monkeypatch.setattr("services.gateway.core.breaker.REFUSED_S", 0.02)
    wanted = {
        "submit": subjects.node_submit(ODD_NODE),
        "cancel": subjects.node_cancel(ODD_NODE),
        "models": subjects.REGISTRY_MODELS,
        "load": subjects.LOAD_GATEWAY,
    }[subject]
    broker = MemoryBroker()
    others, own = MemoryBus(broker, "others"), MemoryBus(broker, "gateway")
    for method in ("request", "publish"):
        faulty.inject(
            monkeypatch, MemoryBus, method, lambda bus, said, *_: bus is own and said == wanted
        )
    async with two_models((others, own)) as (cluster, _):
        for error in ERRORS:
            faulty.error = error
            faulty.now.clear()
            await ask_odd(cluster, stop="quick")
            async with asyncio.timeout(PATIENCE_S):
                await faulty.now.wait()
            await the_sound_one_answers(cluster)
            faulty.error = None
        said = len(cluster.loads)
        await cluster.until(lambda: len(cluster.loads) > said)
        assert await ask_odd(cluster) == 200


async def test_the_first_answers_may_fail(monkeypatch: pytest.MonkeyPatch, faulty: Faulty) -> None:
    """Those of registry and planner: with an untyped error of theirs, as with every other."""
    monkeypatch.setattr("services.gateway.failures.AFTER_FAILURE_S", 0.01)
    monkeypatch.setattr("services.gateway.service.LEARN_S", 0.01)
    monkeypatch.setattr("services.gateway.planner_link.RETRY_S", 0.01)
    left = {"_models": list(BUGS), "_instances": list(BUGS)}
    for method, errors in left.items():
        original = getattr(Cluster, method)

        async def answer(
            self: Cluster, message: Message, errors: Any = errors, original: Any = original
        ) -> Message:
            if errors and isinstance(error := errors.pop(), Exception):
                raise error
            reply: Message = await original(self, message)
            return reply

        monkeypatch.setattr(Cluster, method, answer)
    async with running(replica(1)) as cluster:
        await nodes_of(cluster, 1, pause_at=None)
        await the_sound_one_answers(cluster)
    assert not left["_models"]


# --- messages that mean nothing ----------------------------------------------


def _messages(kind: type[Any], **likely: Any) -> st.SearchStrategy[Any]:
    return st.lists(well_framed(kind, **likely), min_size=5, max_size=20)


LIKELY: dict[str, Any] = {
    "name": [ODD],
    "model_id": [ODD_ID],
    "id": [InstanceId("replica-2")],
    "node": [ODD_NODE],
    "state": list(InstanceState),
    "request": [RequestId("a-request")],
    "attempt": [1],
    "slots": [8],
    "capacity": [1.0],
}


@pytest.mark.parametrize(
    ("subject", "kind"),
    [
        (subjects.INSTANCES, InstanceSet),
        (subjects.INSTANCES, InstanceChange),
        (subjects.POOL_MODELS, ModelAdded),
        (subjects.POOL_MODELS, ModelRemoved),
        (subjects.POOL_NODES, NodeGone),
        ("tokens", Tokens),
    ],
)
def test_messages_that_mean_nothing(subject: str, kind: type[Message]) -> None:
    @settings(max_examples=6, deadline=None)
    @given(messages=_messages(kind, **LIKELY))
    def survives(messages: list[Message]) -> None:
        asyncio.run(send(messages))

    async def send(messages: list[Message]) -> None:
        async with two_models() as (cluster, _), asyncio.TaskGroup() as group:
            node = cluster.nodes[2]
            node.pause_at = 3
            stream = Reader(cluster, {"model": ODD})
            reading = group.create_task(stream.read())
            await stream.until(3)
            to = subjects.gateway_tokens(cluster.service.id) if subject == "tokens" else subject
            for message in messages:
                if isinstance(message, Tokens) and message.tokens:
                    ours = {"request": node.submits[0].request, "attempt": 1}
                    message = _with_first(message, ours)
                await cluster.bus.publish(to, message)
            await the_sound_one_answers(cluster)
            await cluster.until(lambda: bool(cluster.loads[-1].models))
            reading.cancel()

    survives()


async def test_whoever_asks_for_the_story_of_nonsense_is_answered() -> None:
    async with two_models() as (cluster, record):
        subject = subjects.gateway_story(cluster.service.id)
        for about in (record.model_id, "replica-2", *STRANGE_TEXTS):
            query = StoryQuery(subject=about)
            await cluster.bus.request(subject, query, Told, timeout=PATIENCE_S)
        await the_sound_one_answers(cluster)


def _with_first(message: Tokens, change: dict[str, Any]) -> Tokens:
    token = msgspec.structs.replace(message.tokens[0], **change)
    return msgspec.structs.replace(message, tokens=(token, *message.tokens[1:]))


# --- templates -----------------------------------------------------------------

NESTED = "{% for a in b %}" * 25 + "{% endfor %}" * 25


@pytest.mark.parametrize(
    "template",
    [[{"name": [], "template": "x"}], "(" * 5000, "{{" + "(" * 5000, NESTED, "{{ %}", 7],
    ids=["name", "text", "deep", "nested", "malformed", "number"],
)
async def test_a_template_that_cannot_be_read_is_its_model_s(template: object) -> None:
    async with two_models() as (cluster, _):
        name = ModelName("bad")
        record = await cluster.store_model(text_files(template), name=name)
        await cluster.add(record)
        await cluster.until(lambda: name in {m.model for m in cluster.loads[-1].models})
        reader = Reader(cluster, {"model": name, "max_tokens": 1})
        async with asyncio.timeout(PATIENCE_S):
            await reader.read()
        assert reader.status in (429, 503)
        await the_sound_one_answers(cluster)
