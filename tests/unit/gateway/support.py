"""A gateway on a memory bus, with a registry, a planner and nodes that speak the real messages."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from services.gateway.service import GatewayService
from shared import subjects
from shared.bus.base import Bus, On
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.config import GatewayConfig
from shared.errors import LambdaScaleError
from shared.ids import EventId, Generation, InstanceId, ModelId, ModelName, NodeId, RequestId
from shared.layout import Manifest, encode_manifest
from shared.messages import Message, Ok, Ping
from shared.messages.access import AccessPage, AccessQuery, AccessRecord
from shared.messages.instances import (
    Coming,
    Instance,
    InstanceSet,
    InstanceSets,
    InstancesQuery,
    InstanceState,
    Stage,
)
from shared.messages.load import GatewayLoad, ModelLoad
from shared.messages.pool import ModelAdded, ModelRecord, Models, ModelsQuery, NodeGone, Task
from shared.messages.scaling import FirstPartialToken
from shared.messages.serving import (
    AttemptFailed,
    Cancel,
    Logprobs,
    Scores,
    Submit,
    Token,
    Tokens,
)

BOS, EOS, USER, ASSISTANT = "<s>", "</s>", "<|user|>", "<|assistant|>"
SPECIAL = (BOS, EOS, USER, ASSISTANT)
EOS_ID = 1
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system goes first') }}"
    "{% endif %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NAME = ModelName("tiny")
CONTEXT = 512
LABELS = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis")
GENERATION = Generation(1)
PATIENCE_S = 100.0


def byte_tokenizer() -> Tokenizer:
    """A byte-level tokenizer without merges: every byte is a token, characters are split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    return tokenizer


TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.get_vocab_size()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def text_files(template: object = CHAT_TEMPLATE) -> dict[str, bytes]:
    config = {"bos_token": BOS, "eos_token": {"content": EOS}, "chat_template": template}
    return {
        "tokenizer.json": TOKENIZER.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def replica(
    number: int,
    *,
    state: InstanceState = InstanceState.SERVING,
    slots: int = 8,
    capacity: float = 1.0,
) -> Instance:
    node = NodeId(f"node-{number}")
    return Instance(
        id=InstanceId(f"replica-{number}"),
        stages=(Stage(node, "tcp://x", 0, 4),),
        state=state,
        capacity=capacity,
        slots=slots,
        event=None,
    )


def path(*numbers: int, state: InstanceState = InstanceState.SERVING, slots: int = 8) -> Instance:
    """A path over the nodes with these numbers, led by the first."""
    stages = tuple(Stage(NodeId(f"node-{n}"), "tcp://x", i, i + 1) for i, n in enumerate(numbers))
    return Instance(
        id=InstanceId("path-" + "-".join(map(str, numbers))),
        stages=stages,
        state=state,
        capacity=1.0 / len(numbers),
        slots=slots,
        event=EventId("event-1"),
    )


class Recorder:
    """Messages that were seen, and a way to wait for what they should come to."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()

    async def changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(condition)


def logprobs_of(submit: Submit, index: int, token: int) -> Logprobs | None:
    """What a scripted node says: token i has -i/8, and the most probable ones are -1, -2, ..."""
    count = submit.sampling.logprobs
    if count is None:
        return None
    return Logprobs(-index / 8, tuple((4 + i, -1.0 - i) for i in range(count)))


def scores_of(submit: Submit, first: int, at_once: int) -> Iterator[Scores]:
    """What a scripted node says of a prompt from token `first` on: token i has -i/4."""
    top = tuple((4 + i, -1.0 - i) for i in range(submit.sampling.logprobs or 0))
    end = submit.prompt_tokens
    for start in range(first, end, at_once):
        logprobs = tuple(Logprobs(-i / 4, top) for i in range(start, min(start + at_once, end)))
        yield Scores(submit.request, submit.attempt, start - end, logprobs)


class ScriptedNode(Recorder):
    """Answers Submit as a node does, and generates what `script` says, index by index."""

    def __init__(self, bus: Bus, number: int) -> None:
        super().__init__()
        self.id = NodeId(f"node-{number}")
        self.script: Callable[[Submit], Sequence[int]] = lambda submit: ids_of("hello world")
        self.refusal: LambdaScaleError | None = None
        self.pause_at: int | None = None
        """The index at which it waits for `resume`."""
        self.scored_at_once = 1 << 30
        """Tokens of a prompt in a message."""
        self.vector: Callable[[Submit], bytes] = lambda submit: b""
        """The prompt's vector, if it is asked for."""
        self.at_once = 1
        """Tokens in a message, as of a step with accepted ones."""
        self.cached: Callable[[Submit], int] = lambda submit: 0
        """Tokens that it finds in its prefix cache."""
        self.resume = asyncio.Event()
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.sent: list[Token] = []
        self.scores: list[Scores] = []
        self._bus = bus
        self._tasks: dict[tuple[RequestId, int], asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> "ScriptedNode":
        await self._group.__aenter__()
        await self._bus.serve(subjects.node_submit(self.id), Submit, self._submit)
        await self._bus.subscribe(subjects.node_cancel(self.id), On(Cancel, self._cancel))
        self._pings = await self._bus.serve(subjects.node_ping(self.id), Ping, self._pong)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await self._group.__aexit__(None, None, None)

    async def submitted(self, times: int) -> None:
        await self.until(lambda: len(self.submits) >= times)

    async def die(self) -> None:
        """As far as the bus can tell."""
        await self._pings.close()

    async def _pong(self, _: Ping) -> Message:
        return Ok()

    async def _submit(self, message: Submit) -> Message:
        self.submits.append(message)
        await self.changed()
        if self.refusal:
            raise self.refusal
        work = self._group.create_task(self._generate(message))
        self._tasks[message.request, message.attempt] = work
        return Ok()

    async def _cancel(self, message: Cancel) -> None:
        self.cancels.append(message)
        if task := self._tasks.get((message.request, message.attempt)):
            task.cancel()
        await self.changed()

    async def _generate(self, submit: Submit) -> None:
        await self._score(submit)
        script = [*self.script(submit), EOS_ID]
        tokens: list[Token] = []
        cached = self.cached(submit)
        if submit.pooling and (vector := self.vector(submit)):
            done = Token(submit.request, submit.attempt, 0, 0, "length", vector=vector)
            await self.send(submit, done)
            return
        for index in range(len(submit.tokens) - submit.prompt_tokens, submit.max_tokens):
            if index == self.pause_at:
                await self.resume.wait()
            value = script[index] if index < len(script) else EOS_ID
            finish = "stop" if value in submit.stop_ids else ""
            if not finish and index + 1 == submit.max_tokens:
                finish = "length"
            logprobs = logprobs_of(submit, index, value)
            token = Token(submit.request, submit.attempt, index, value, finish, logprobs, cached)
            tokens.append(token)
            cached = 0
            if finish or len(tokens) == self.at_once:
                await self.send(submit, *tokens)
                tokens.clear()
            await asyncio.sleep(0)
            if finish:
                return

    async def _score(self, submit: Submit) -> None:
        first = submit.score_from or submit.prompt_tokens
        for scores in scores_of(submit, first, self.scored_at_once):
            if scores.index == self.pause_at:
                await self.resume.wait()
            await self.send(submit, scores=(scores,))

    async def send(
        self,
        submit: Submit,
        *tokens: Token,
        failed: AttemptFailed | None = None,
        scores: tuple[Scores, ...] = (),
    ) -> None:
        self.sent += tokens
        self.scores += scores
        gone = (failed,) if failed else ()
        message = Tokens(node=self.id, tokens=tokens, failed=gone, scores=scores)
        await self._bus.publish(subjects.gateway_tokens(submit.gateway), message)
        await self.changed()


class Cluster(Recorder):
    """Everything around the gateway."""

    def __init__(self, bus: Bus, service: GatewayService) -> None:
        super().__init__()
        self.bus = bus
        self.service = service
        self.records: tuple[ModelRecord, ...] = ()
        self.access: list[AccessRecord] = []
        """Tenants and keys, in the order of their changes."""
        self.sets: tuple[InstanceSet, ...] = ()
        self.loads: list[GatewayLoad] = []
        """The reports, each with all the models that are listed."""
        self._load_of: dict[ModelName, ModelLoad] = {}
        self._listed: tuple[ModelName, ...] = ()
        self.arrivals: list[FirstPartialToken] = []
        self.nodes: dict[int, ScriptedNode] = {}
        self.stack = AsyncExitStack()
        self._revision = 0

    async def answer(self) -> None:
        """As registry and planner."""
        await self.bus.serve(subjects.REGISTRY_MODELS, ModelsQuery, self._models)
        await self.bus.serve(subjects.REGISTRY_ACCESS, AccessQuery, self._who_may_call)
        await self.bus.serve(subjects.PLANNER_INSTANCES, InstancesQuery, self._instances)
        await self.bus.subscribe(subjects.LOAD_GATEWAY, On(GatewayLoad, self._load))
        await self.bus.subscribe(subjects.ARRIVALS, On(FirstPartialToken, self._arrival))

    async def _models(self, _: ModelsQuery) -> Models:
        return Models(records=self.records, keeps_access=True)

    async def _who_may_call(self, query: AccessQuery) -> AccessPage:
        return AccessPage(records=tuple(self.access[query.since :]), revision=len(self.access))

    async def _instances(self, _: InstancesQuery) -> InstanceSets:
        return InstanceSets(sets=self.sets)

    async def _load(self, message: GatewayLoad) -> None:
        if message.whole:
            self._load_of, self._listed = {}, message.listed
        self._load_of |= {load.model: load for load in message.models}
        every = tuple(self._load_of.get(name, ModelLoad(model=name)) for name in self._listed)
        self.loads.append(msgspec.structs.replace(message, models=every))
        await self.changed()

    async def _arrival(self, message: FirstPartialToken) -> None:
        self.arrivals.append(message)
        await self.changed()

    async def store_model(
        self,
        files: dict[str, bytes] | None = None,
        name: ModelName = NAME,
        *,
        embeds: bool = False,
        **changes: Any,
    ) -> ModelRecord:
        objects = await self.bus.objects()
        config = {"vocab_size": VOCAB, "eos_token_id": EOS_ID, **changes}
        manifest = Manifest("LlamaForCausalLM", config, 1 << 20, ())
        found = text_files() if files is None else files
        record = ModelRecord(
            name=name,
            model_id=ModelId(f"id-of-{name}"),
            manifest=await objects.put(encode_manifest(manifest)),
            files={key: await objects.put(data) for key, data in found.items()},
            nbytes=0,
            n_blocks=4,
            block_bytes=(1, 1, 1, 1),
            context_length=CONTEXT,
            created_ns=5_000_000_000,
            embeds=embeds,
        )
        self.records = (*self.records, record)
        return record

    async def store_classifier(self, name: ModelName) -> ModelRecord:
        """Publishes a classifier of images of 8 x 8 pixels."""
        objects = await self.bus.objects()
        config = {
            "architectures": ["ViTForImageClassification"],
            "id2label": {str(index): label for index, label in enumerate(LABELS)},
            "preprocessor_config": {"size": {"height": 8, "width": 8}},
        }
        manifest = Manifest("ViTForImageClassification", config, 1 << 20, ())
        record = ModelRecord(
            name=name,
            model_id=ModelId(f"id-of-{name}"),
            manifest=await objects.put(encode_manifest(manifest)),
            files={},
            nbytes=0,
            n_blocks=4,
            block_bytes=(1, 1, 1, 1),
            context_length=5,
            created_ns=5_000_000_000,
            task=Task.CLASSIFY,
        )
        self.records = (*self.records, record)
        return record

    async def node(self, number: int) -> ScriptedNode:
        if number not in self.nodes:
            entered = await self.stack.enter_async_context(ScriptedNode(self.bus, number))
            self.nodes[number] = entered
        return self.nodes[number]

    async def publish(
        self,
        *instances: Instance,
        record: ModelRecord | None = None,
        trace: str = "",
        step_s: float = 0.0,
        coming: Coming | None = None,
    ) -> None:
        """The model's instances, now; nodes that they need are made. `step_s`: what they say that
        any pass takes, and each token more in it."""
        for instance in instances:
            await self.node(int(instance.leader.removeprefix("node-")))
        self._revision += 1
        record = record or self.records[0]
        new = InstanceSet(
            name=record.name,
            model_id=record.model_id,
            epoch=1,
            revision=self._revision,
            instances=instances,
            decode_s=step_s,
            prefill_s_per_token=step_s,
            trace=trace,
            coming=coming,
        )
        self.sets = (new,)
        await self.bus.publish(subjects.INSTANCES, new)

    def _routes(self, name: ModelName) -> set[InstanceId]:
        models = self.service._dispatch._models.values()
        return {key for model in models if model.name == name for key in model.table.routes}

    async def add(self, record: ModelRecord) -> None:
        await self.bus.publish(subjects.POOL_MODELS, ModelAdded(record=record))

    async def lose(self, number: int) -> None:
        gone = NodeGone(node=NodeId(f"node-{number}"), generation=GENERATION, reason="test")
        await self.bus.publish(subjects.POOL_NODES, gone)

    def knows(self, instances: Sequence[Instance], *, models: int) -> bool:
        """Whether the gateway has said that it knows so many models, and has the first's
        instances."""
        found = self.loads[-1].models if self.loads else ()
        return (
            bool(self.loads)
            and len(found) >= models
            and (not instances or self._routes(found[0].model) == {i.id for i in instances})
        )

    async def loaded(self, condition: Callable[[Any], bool]) -> None:
        """Waits for a load report of the (first) model that fulfils the condition."""
        start = len(self.loads)
        await self.until(
            lambda: any(load.models and condition(load.models[0]) for load in self.loads[start:])
        )


@asynccontextmanager
async def running(
    *instances: Instance,
    config: GatewayConfig | None = None,
    model: bool = True,
    files: dict[str, bytes] | None = None,
    buses: Sequence[Bus] = (),
) -> AsyncIterator[Cluster]:
    """A gateway that knows one model with these instances.

    Replicas are not checked, since checks are requests. `buses`: two that are not open yet, for
    the others and for the gateway; on one in memory if none are given.
    """
    broker = MemoryBroker()
    settings = msgspec.structs.replace(config or GatewayConfig(), port=0, check_s=0)
    others, own = buses or (MemoryBus(broker, "others"), MemoryBus(broker, "gateway"))
    async with others, own:
        service = GatewayService(own, settings)
        cluster = Cluster(others, service)
        if model:
            await cluster.store_model(files)
            await cluster.publish(*instances)
        await cluster.answer()
        async with cluster.stack, service:
            await cluster.until(lambda: cluster.knows(instances, models=int(model)))
            yield cluster
