"""A request moves to another node: with its KV, and with its KV computed anew.

Run: `.venv/bin/python -m benchmarks.handover`, four minutes. First in virtual time, from a node
that prefills to another that decodes (`benchmarks.handover_modelled`). Then two real nodes hold a
Llama of 87M parameters in bfloat16, and their links are paced. A request runs on one of them, and
moves to the other: *early*, when its prompt has just begun there, or after some tokens. Medians of
several moves, each with a prompt of its own.

prefill    what the target takes to compute the prompt's KV: the limit for a copy
moved in   from the move's beginning to the first token of the target; early: from the first token
           of the source
pause      the longest time between two tokens of the stream, from the source's last to the one
           after the target's first, in steps of the target
left       positions that the target computes before it goes on

A row of moves is judged only if all of them used KV of the source: beside other work it may come
too late, and then nothing is said of how a copy does.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks import handover_modelled
from services.local.cluster import Cluster, ClusterSpec, bus_config
from services.local.credentials import User
from services.local.demo_model import CheckpointSpec, make_checkpoint
from services.local.publishing import publish
from services.local.watch import Watch
from shared import subjects
from shared.bus.base import Bus, On
from shared.bus.nats import NatsBus
from shared.ids import GatewayId, InstanceId, ModelName, NodeId, RequestId
from shared.messages import Ok
from shared.messages.instances import Instance, Stage
from shared.messages.pool import ModelRecord
from shared.messages.scaling import ImportModel
from shared.messages.serving import Cancel, Sampling, Submit, Tokens
from shared.permissions import Role

SPEC = CheckpointSpec(
    layers=12,
    hidden=768,
    intermediate=2048,
    heads=12,
    kv_heads=4,
    vocab_size=512,
    dtype=torch.bfloat16,
)
GATEWAY = GatewayId("bench")
PROMPTS = 256, 1024, 2048
BEFORE, AFTER = 8, 100
"""Tokens before a request moves, and that it has in all."""
LIMIT_S = 120.0
PAUSE_BAR, COPY_BAR = 2.0, 1.0
"""In steps; in prefills."""


@dataclass
class Stream:
    """When each token of a request came first, and from which attempt."""

    at: dict[int, float] = field(default_factory=dict)
    attempt: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    cached: tuple[int, int] = (0, 0)
    """(index of the first token that the target drew, positions whose KV it had then)"""
    failed: str = ""

    def gaps(self) -> list[float]:
        times = [self.at[index] for index in sorted(self.at)]
        return [late - early for early, late in pairwise(times)]

    @property
    def first(self) -> int:
        """The first token that came from the target."""
        return min(index for index, attempt in self.attempt.items() if attempt == 2)

    def pause(self, since: float) -> float:
        """The longest time between two tokens where the target goes on. `since`: the time before
        its first token, if the source gave none."""
        last = max(self.first, self.cached[0]) + 1
        times = [self.at.get(index, since) for index in range(self.first - 1, last + 1)]
        return max(late - early for early, late in pairwise(times))


@dataclass
class Move:
    prefill_s: float
    step_s: float
    moved_s: float
    pause_s: float
    left: int
    copied: bool
    """Whether the target used KV of the source."""


class Gateway:
    """As much of a gateway as it takes to move a request at will."""

    def __init__(self, bus: Bus, record: ModelRecord, stages: dict[NodeId, Stage]) -> None:
        self._bus = bus
        self._record = record
        self._stages = stages
        self._streams: dict[RequestId, Stream] = {}
        self._changed = asyncio.Event()
        self._made = 0

    async def listen(self) -> None:
        await self._bus.subscribe(subjects.gateway_tokens(GATEWAY), On(Tokens, self._on_tokens))

    async def _on_tokens(self, message: Tokens) -> None:
        now = time.perf_counter()
        for token in message.tokens:
            stream = self._streams[token.request]
            stream.at.setdefault(token.index, now)
            stream.attempt.setdefault(token.index, token.attempt)
            if token.attempt == 2 and token.cached:
                stream.cached = token.index, token.cached
            stream.tokens.setdefault(token.index, token.token)
        for failure in message.failed:
            self._streams[failure.request].failed = failure.message
        self._changed.set()

    async def _until(self, stream: Stream, count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(stream.at) < count:
                if stream.failed:
                    raise RuntimeError(stream.failed)
                self._changed.clear()
                await self._changed.wait()

    def _submit(self, prompt: tuple[int, ...], node: NodeId, count: int) -> Submit:
        self._made += 1
        request = RequestId(f"r{self._made}")
        self._streams[request] = Stream()
        return Submit(
            request=request,
            attempt=1,
            gateway=GATEWAY,
            model_id=self._record.model_id,
            instance=InstanceId("bench"),
            stages=(self._stages[node],),
            tokens=prompt,
            prompt_tokens=len(prompt),
            max_tokens=count,
            stop_ids=(),
            sampling=Sampling(),
        )

    async def _send(self, submit: Submit) -> None:
        subject = subjects.node_submit(submit.stages[0].node)
        await self._bus.request(subject, submit, Ok, timeout=LIMIT_S)

    async def run(self, prompt: tuple[int, ...], node: NodeId) -> tuple[float, float, list[int]]:
        """(seconds to the first token, median step, tokens) of a request that stays."""
        submit = self._submit(prompt, node, AFTER)
        stream, began = self._streams[submit.request], time.perf_counter()
        await self._send(submit)
        await self._until(stream, AFTER)
        tokens = [stream.tokens[index] for index in range(AFTER)]
        return stream.at[0] - began, statistics.median(stream.gaps()), tokens

    async def move(
        self, prompt: tuple[int, ...], source: NodeId, target: NodeId, before: int = BEFORE
    ) -> Stream:
        """Moves a request after it has had AFTER tokens."""
        first = self._submit(prompt, source, AFTER)
        stream = self._streams[first.request]
        await self._send(first)
        await self._until(stream, before)
        known = tuple(stream.tokens[index] for index in range(len(stream.tokens)))
        moved = Submit(
            request=first.request,
            attempt=2,
            takes_over=1,
            kv_from=first.stages,
            gateway=GATEWAY,
            model_id=first.model_id,
            instance=first.instance,
            stages=(self._stages[target],),
            tokens=(*prompt, *known),
            prompt_tokens=len(prompt),
            max_tokens=AFTER,
            stop_ids=(),
            sampling=Sampling(),
        )
        self.began = time.perf_counter()
        await self._send(moved)
        cancel = Cancel(request=first.request, attempt=1)
        await self._bus.publish(subjects.node_cancel(source), cancel)
        await self._until(stream, AFTER)
        return stream


@asynccontextmanager
async def running(folder: Path, kv_moves: str, mbit: float) -> AsyncIterator[Gateway]:
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        make_checkpoint(checkpoint, SPEC)
    settings = {
        "LAMBDASCALE_NODE_THREADS": "1",
        "LAMBDASCALE_NODE_SPECULATION": "0",
        "LAMBDASCALE_NODE_KV_BYTES": str(256 << 20),
        "LAMBDASCALE_NODE_KV_MOVES": kv_moves,
        "LAMBDASCALE_NODE_LINK_BYTES_PER_S": str(int(mbit * 1e6 / 8)),
    }
    spec = ClusterSpec(
        directory=folder / kv_moves, nodes=2, gateway_port=0, settings=settings, apart=True
    )
    cluster = Cluster(spec)
    await cluster.start()
    try:
        as_gateway = bus_config(cluster.state, user=User(Role.GATEWAY))
        async with (
            NatsBus(bus_config(cluster.state), "bench") as bus,
            NatsBus(as_gateway, "bench-gateway") as gateway_bus,
        ):
            watch = Watch()
            await watch.follow(bus)
            nodes = NodeId("node-0"), NodeId("node-1")
            request = ImportModel(path=str(checkpoint), name=ModelName("m"), min_instances=2)
            record = await publish(bus, request, node=nodes[0], say=lambda _: None)
            async with asyncio.timeout(LIMIT_S):
                while len(found := _replicas(watch.instances)) < 2:
                    await watch.change()
            gateway = Gateway(gateway_bus, record, found)
            await gateway.listen()
            yield gateway
    finally:
        await cluster.stop()


def _replicas(instances: tuple[Instance, ...]) -> dict[NodeId, Stage]:
    return {i.stages[0].node: i.stages[0] for i in instances if len(i.stages) == 1}


def prompt_of(length: int, what: str) -> tuple[int, ...]:
    """A prompt of its own for each use: one that was there before would be found in the prefix
    cache."""
    return tuple(random.Random(f"{what} {length}").choices(range(3, SPEC.vocab_size), k=length))


async def measure(gateway: Gateway, length: int, rounds: int, before: int = BEFORE) -> list[Move]:
    moves = []
    for number in range(rounds):
        source, target = (NodeId(f"node-{(number + side) % 2}") for side in (0, 1))
        prompt = prompt_of(length, f"move {number} after {before}")
        stream = await gateway.move(prompt, source, target, before)
        since = gateway.began if before else stream.at[0]
        drawn, cached = stream.cached
        left = length + (drawn or stream.first) - cached
        other = prompt_of(length, f"run {number} after {before}")
        prefill_s, step_s, _ = await gateway.run(other, target)
        moved_s = stream.at[stream.first] - since
        pause_s, copied = stream.pause(since), cached > 0
        moves.append(Move(prefill_s, step_s, moved_s, pause_s, left, copied))
    return moves


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--link-mbit", type=float, default=1000.0)
    args = parser.parse_args()
    modelled = handover_modelled.report()  # in a loop of its own
    found = asyncio.run(measure_all(args.rounds, args.link_mbit))
    return report(found, args.link_mbit) or int(not modelled)


async def measure_all(rounds: int, link_mbit: float) -> dict[tuple[str, int], list[Move]]:
    """The moves by (what becomes of the KV, the prompt's length)."""
    found: dict[tuple[str, int], list[Move]] = {}
    with tempfile.TemporaryDirectory(prefix="lambdascale-bench-") as folder:
        for way in ("always", "never"):
            async with running(Path(folder), way, link_mbit) as gateway:
                await measure(gateway, PROMPTS[-1] + 1, 2)  # what is slow once
                for length in PROMPTS:
                    if way == "always":
                        found["early", length] = await measure(gateway, length, rounds, 0)
                    found[way, length] = await measure(gateway, length, rounds)
                    print(f"kv_moves {way}, {length} tokens: done", file=sys.stderr)
    return found


def report(found: dict[tuple[str, int], list[Move]], mbit: float) -> int:
    print(f"links of {mbit:g} Mbit/s; medians of {len(next(iter(found.values())))} moves, ms")
    print(
        f"{'prompt':>6} {'KV':<10} {'prefill':>8} {'step':>6} {'moved in':>9} {'left':>6} "
        f"{'pause':>8}  steps"
    )
    met = True
    for (way, length), moves in sorted(found.items(), key=lambda item: item[0][1]):
        prefill, step, moved, pause, left = (
            statistics.median(getattr(move, name) for move in moves)
            for name in ("prefill_s", "step_s", "moved_s", "pause_s", "left")
        )
        said = {"always": "copied", "early": "early", "never": "computed"}[way]
        print(
            f"{length:>6} {said:<10} {prefill * 1e3:8.1f} {step * 1e3:6.1f} {moved * 1e3:9.1f} "
            f"{left:6.0f} {pause * 1e3:8.1f}  {pause / step:.1f}"
        )
        used = sum(move.copied for move in moves)
        if way == "never":
            continue
        if used < len(moves):
            print(
                f"       KV was used in {used} of {len(moves)} moves, and computed anew in the "
                f"others: not judged"
            )
            continue
        within = pause / step <= PAUSE_BAR and moved / prefill <= COPY_BAR
        met &= within
        print(
            f"       bar: a pause of {PAUSE_BAR:g} steps at most, and sooner than a prefill "
            f"({moved / prefill:.2f} of one): {'met' if within else 'NOT met'}"
        )
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
