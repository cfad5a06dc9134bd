"""A real cluster of processes for tests, the requests one sends to it, and the oracle's answers."""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
import torch
from transformers import AutoModelForCausalLM

from services.cli.events import decision_line, event_line
from services.local.cluster import Cluster, ClusterSpec, bus_config
from services.local.credentials import User
from services.local.nats_servers import Place
from services.local.publishing import import_model
from services.local.watch import Watch
from shared import subjects
from shared.bus.base import On
from shared.bus.nats import NatsBus
from shared.ids import NO_ADAPTER, GatewayId, InstanceId, ModelId, ModelName, NodeId, RequestId
from shared.messages import Ok
from shared.messages.changes import whole_status
from shared.messages.decisions import Decisions, DecisionsQuery
from shared.messages.instances import Stage
from shared.messages.pool import ModelRecord, NodeStatus, ReportStatus
from shared.messages.scaling import (
    ImportModel,
    PlannerQuery,
    PlannerState,
    ScaleAccepted,
    SetInstances,
)
from shared.messages.serving import Sampling, Submit, Tokens
from shared.permissions import Role
from shared.pool_pages import read_pool
from tests.support import forks

MODEL = ModelName("tiny")
LIMIT_S = 200.0


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    error: str = ""


class Running:
    """A cluster that is up, seen over its bus, with the model published."""

    def __init__(self, cluster: Cluster, bus: NatsBus, watch: Watch, record: ModelRecord) -> None:
        self.cluster = cluster
        self.bus = bus
        self.watch = watch
        self.record = record
        self.url = cluster.state.gateway_url
        self.urls = cluster.state.gateway_urls
        self.statuses: dict[NodeId, NodeStatus] = {}
        """What each node said last."""
        self._gateways = itertools.count()

    async def follow(self) -> None:
        await self.bus.subscribe(subjects.POOL_STATUS, On(NodeStatus, self._on_status))
        await self.bus.publish(subjects.POOL_REPORT, ReportStatus())

    async def _on_status(self, message: NodeStatus) -> None:
        if status := whole_status(self.statuses.get(message.node), message):
            self.statuses[message.node] = status

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                while not condition():
                    await self.watch.change()
        except TimeoutError as error:
            seen = "\n".join([f"{what}: not within {LIMIT_S:.0f} s", *await self._account()])
            raise AssertionError(seen) from error

    async def _account(self) -> list[str]:
        """What was seen of the model, and the planner's reasons."""
        ask = self.bus.request
        decisions = await ask(
            subjects.PLANNER_DECISIONS, DecisionsQuery(name=MODEL), Decisions, timeout=10.0
        )
        state = await ask(subjects.PLANNER_STATE, PlannerQuery(), PlannerState, timeout=10.0)
        return [
            *(f"{node} runs blocks {sorted(held)}" for node, held in self.watch.held.items()),
            *(f"instance {instance}" for instance in self.watch.instances),
            *(event_line(event) for event in state.events),
            *(decision_line(decided) for decided in decisions.decisions),
        ]

    async def replicas(self, count: int) -> None:
        """Waits until exactly `count` replicas serve, and nothing else."""
        await self.until(
            lambda: len(self.watch.replicas) == len(self.watch.instances) == count,
            f"{count} replicas",
        )

    async def scale(self, count: int) -> ScaleAccepted:
        """Asks the planner for this number of instances, as an operator does."""
        message = SetInstances(name=MODEL, instances=count)
        return await self.bus.request(
            subjects.PLANNER_SCALE, message, ScaleAccepted, timeout=LIMIT_S
        )

    def pid(self, name: str) -> int:
        return next(p.pid for p in self.cluster.state.processes if p.name == name)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid(name), number)

    async def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        model: str = MODEL,
        *,
        into: Answer | None = None,
        headers: Mapping[str, str] | None = None,
        **fields: float,
    ) -> Answer:
        """One streaming completion of token ids; greedy, unless other fields say how. `into`: the
        answer as it comes."""
        answer = into or Answer()
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **fields,
        }
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S * 2)) as session,
            session.post(f"{self.url}/v1/completions", json=body, headers=headers) as response,
        ):
            if response.status != 200:
                answer.error = await response.text()
                return answer
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[6:])
                answer.error = answer.error or str(chunk.get("error", ""))
                for choice in chunk.get("choices", ()):
                    answer.tokens += choice.get("token_ids") or ()
                    answer.finish = choice["finish_reason"] or answer.finish
        return answer

    async def ask_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, model: str = MODEL
    ) -> list[Answer]:
        asked = (self.ask(prompt, max_tokens, model) for prompt in prompts)
        return list(await asyncio.gather(*asked))

    async def path(self, *names: str) -> tuple[Stage, ...]:
        """The model's blocks, cut evenly over these nodes in this order."""
        pool = await read_pool(partial(self.bus.request, timeout=60.0))
        addresses = {view.info.node: view.info.address for view in pool.nodes}
        cuts = [self.record.n_blocks * i // len(names) for i in range(len(names) + 1)]
        return tuple(
            Stage(NodeId(name), addresses[NodeId(name)], start, stop)
            for name, start, stop in zip(names, cuts, cuts[1:], strict=False)
        )

    async def over_path(
        self,
        stages: tuple[Stage, ...],
        prompt: Sequence[int],
        count: int,
        adapter: ModelId = NO_ADAPTER,
        trace: str = "",
    ) -> list[int]:
        """Submits to a path as a gateway does, and collects what it streams."""
        gateway = GatewayId(f"test-{next(self._gateways)}")
        got: list[int] = []
        over = asyncio.Event()

        async def receive(message: Tokens) -> None:
            assert not message.failed, message.failed
            for token in message.tokens:
                assert token.index == len(got)
                got.append(token.token)
                if token.finish:
                    over.set()

        submit = Submit(
            request=RequestId(gateway),
            attempt=0,
            gateway=gateway,
            model_id=self.record.model_id,
            instance=InstanceId("by-hand"),
            stages=stages,
            tokens=tuple(prompt),
            prompt_tokens=len(prompt),
            max_tokens=count,
            stop_ids=(),
            sampling=Sampling(),
            adapter=adapter,
            trace=trace,
        )
        to = subjects.node_adapted if adapter else subjects.node_submit
        as_gateway = bus_config(self.cluster.state, user=User(Role.GATEWAY))
        async with NatsBus(as_gateway, gateway) as bus, asyncio.timeout(LIMIT_S):
            await bus.subscribe(subjects.gateway_tokens(gateway), On(Tokens, receive))
            await bus.request(to(stages[0].node), submit, Ok, timeout=60.0)
            await over.wait()
        return got

    async def moved(self) -> int:
        """Requests that the gateway moved from a path to a complete node."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}/metrics") as response,
        ):
            text = await response.text()
        name = f'lambdascale_gateway_switched_requests_total{{choice="moved",model="{MODEL}"}}'
        return sum(int(float(line.split()[-1])) for line in text.splitlines() if name in line)


@asynccontextmanager
async def running(
    directory: Path,
    checkpoint: Path,
    *,
    nodes: int,
    settings: Mapping[str, str] | None = None,
    blocks: int = 0,
    min_instances: int = 1,
    apart: bool = True,
    standbys: int = 0,
    node_standbys: bool = False,
    gateways: int = 1,
    nats_servers: int = 1,
    places: Mapping[str, Place] | None = None,
) -> AsyncIterator[Running]:
    spec = ClusterSpec(
        directory=directory,
        nodes=nodes,
        gateway_port=0,
        settings={
            "LAMBDASCALE_NODE_THREADS": "1",
            "LAMBDASCALE_NODE_ARENA_BYTES": str(64 << 20),
            "LAMBDASCALE_NODE_KV_BYTES": str(512 << 20),
            "LAMBDASCALE_REGISTRY_DURABLE_COPIES": "1",
            **(settings or {}),
        },
        apart=apart,
        standbys=standbys,
        node_standbys=node_standbys,
        gateways=gateways,
        nats_servers=nats_servers,
        places=places or {},
    )
    cluster = Cluster(spec, forks.server())
    await cluster.start()
    try:
        async with NatsBus(bus_config(cluster.state), "test") as bus:
            watch = Watch()
            await watch.follow(bus)
            record = await import_model(
                bus,
                ImportModel(
                    path=str(checkpoint), name=MODEL, blocks=blocks, min_instances=min_instances
                ),
                say=lambda _: None,
            )
            watch.n_blocks = record.n_blocks
            up = Running(cluster, bus, watch, record)
            await up.follow()
            await up.replicas(min_instances)
            yield up
    finally:
        await cluster.stop()


class Oracle:
    """Greedy tokens by transformers on the same checkpoint (fp32, CPU)."""

    def __init__(self, checkpoint: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def tokens(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """`count` tokens for each of some prompts of one length."""
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor([list(prompt) for prompt in prompts]),
                attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        return [[int(token) for token in row[len(prompts[0]) :]] for row in output]


def prompts(count: int, vocab_size: int, length: int = 12) -> list[list[int]]:
    """Different prompts, the same every time."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(3, vocab_size, (count, length), generator=generator)
    return [[int(token) for token in row] for row in rows]
