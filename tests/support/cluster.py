"""A real cluster of processes for tests, the requests one sends to it, and the oracle's answers."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import torch
from transformers import AutoModelForCausalLM

from services.cli.cluster import Cluster, ClusterSpec, bus_config
from services.cli.demo.watch import Watch
from services.cli.models import import_model
from shared import subjects
from shared.bus.nats import NatsBus
from shared.ids import ModelName, NodeId
from shared.messages import Message
from shared.messages.pool import ModelRecord, NodeStatus

MODEL = ModelName("tiny")
LIMIT_S = 60.0


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
        self.statuses: dict[NodeId, NodeStatus] = {}
        """What each node said last."""

    async def follow(self) -> None:
        await self.bus.subscribe(subjects.POOL_STATUS, self._on_status)

    async def _on_status(self, message: Message) -> None:
        if isinstance(message, NodeStatus):
            self.statuses[message.node] = message

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                while not condition():
                    await self.watch.change()
        except TimeoutError as error:
            raise AssertionError(f"{what}: not within {LIMIT_S:.0f} s") from error

    async def replicas(self, count: int) -> None:
        """Waits until exactly `count` replicas serve, and nothing else."""
        await self.until(
            lambda: len(self.watch.replicas) == len(self.watch.instances) == count,
            f"{count} replicas",
        )

    def pid(self, name: str) -> int:
        return next(p.pid for p in self.cluster.state.processes if p.name == name)

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    async def ask(self, prompt: Sequence[int], max_tokens: int, **fields: float) -> Answer:
        """One streaming completion of token ids; greedy, unless other fields say how."""
        answer = Answer()
        body = {
            "model": MODEL,
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
            session.post(f"{self.url}/v1/completions", json=body) as response,
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

    async def ask_all(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
        return list(await asyncio.gather(*(self.ask(prompt, max_tokens) for prompt in prompts)))


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
) -> AsyncIterator[Running]:
    spec = ClusterSpec(
        directory=directory,
        nodes=nodes,
        gateway_port=0,
        settings={
            "LAMBDASCALE_NODE_THREADS": "1",
            "LAMBDASCALE_NODE_ARENA_BYTES": str(64 << 20),
            "LAMBDASCALE_NODE_KV_BYTES": str(512 << 20),
            **(settings or {}),
        },
        apart=apart,
    )
    cluster = Cluster(spec)
    await cluster.start()
    try:
        async with NatsBus(bus_config(cluster.state), "test") as bus:
            watch = Watch()
            await watch.follow(bus)
            record = await import_model(
                bus,
                checkpoint,
                MODEL,
                blocks=blocks,
                min_instances=min_instances,
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
