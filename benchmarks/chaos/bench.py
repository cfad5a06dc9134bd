"""Runs: a burst of requests makes the cluster scale out, and faults hit it meanwhile.

One cluster stands for all runs. Each begins when every process is well again and one replica is
left, and draws its faults from a seed of its own, so that `--runs 1 --seed N` repeats it.
"""

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import transformers
import uvloop

from benchmarks.chaos import harness
from benchmarks.chaos.client import Answered, Client, End, Request
from benchmarks.chaos.faults import SIGNALS, Fault, Kind, alone, draw
from benchmarks.chaos.harness import Harness
from benchmarks.testbed import Testbed
from services.local.demo_model import CheckpointSpec, make_checkpoint
from shared import subjects
from shared.errors import BusError, ConfigError
from shared.ids import EventId, new_id
from shared.messages.scaling import PlannerQuery, PlannerState
from shared.pool_pages import read_pool

MODEL = CheckpointSpec(
    layers=4, hidden=64, intermediate=96, heads=4, kv_heads=2, vocab_size=320, context_length=512
)
PROMPTS, PROMPT_TOKENS = 24, 12
AT_ONCE = 24
"""Requests that come at once: with four slots a replica, worth all nodes."""
PER_S, FOR_S = 4.0, 6.0
"""Requests a second that come then, and for how long."""
WITHIN_S = 4.0
"""Seconds from the burst within which faults begin: while the cluster scales out."""
WELL_S = 120.0
"""Seconds after the last answer within which all must be well again."""


@dataclass(frozen=True, slots=True)
class Settings:
    runs: int
    seed: int
    tokens: int
    lasting_s: float
    """How long a process is stopped, cut off, or on a slow link."""
    silence_s: float
    """A client that hears nothing for so long counts as hung. Streams say every 3 s that they live,
    but on a machine that is busy otherwise they may say it late."""
    directory: Path | None = None
    """Where the cluster's files are. None: in one that is removed afterwards."""


@dataclass(slots=True)
class Run:
    seed: int
    faults: tuple[Fault, ...]
    began_at: float
    urls: dict[str, str]
    """Of the gateways, by the names of their processes."""
    silence_s: float
    """As in Settings."""
    answers: list[Answered] = field(default_factory=list)
    well_s: float | None = None
    """From the last answer until all was well again; None: it was not within WELL_S."""
    stalls_s: dict[Fault, list[float]] = field(default_factory=dict)
    """What each stream waited for its next token when the fault came, if it was alone."""
    gaps_s: list[float] = field(default_factory=list)
    """Where half of the nodes got a notice: the longest time between two tokens of each stream."""
    silences_s: dict[Fault, float] = field(default_factory=dict)
    """How long no block arrived anywhere after the fault, if it was alone and blocks moved before
    and after."""

    def count(self, end: End) -> int:
        return sum(answered.end is end for answered in self.answers)

    @property
    def hung(self) -> int:
        return sum(map(self.hung_times, self.answers))

    def hung_times(self, answered: Answered) -> int:
        """How often nothing came for long from a gateway that was alive and connected."""
        return sum(not self._was_hit(url, at) for url, at in answered.silent)

    def _was_hit(self, url: str, at: float) -> bool:
        """Whether a fault hit the gateway in the silence that ended at a time."""
        faults = [fault for fault in self.faults if self.urls.get(fault.process) == url]
        since = at - self.silence_s - self.began_at
        until = at - self.began_at
        return any(f.at_s <= until and since <= f.at_s + f.for_s + self.silence_s for f in faults)

    @property
    def is_good(self) -> bool:
        bad = self.count(End.WRONG) + self.count(End.LOST) + self.hung
        return bad == 0 and self.well_s is not None


@dataclass(slots=True)
class Results:
    settings: Settings
    without: str
    """Why faults of the network were left out; empty if they were not."""
    runs: list[Run] = field(default_factory=list)


def measure(settings: Settings, say: Callable[[str], None]) -> Results:
    """What the processes logged is kept if a run was not good, or if a directory is named."""
    directory = settings.directory or Path(tempfile.mkdtemp(prefix="lambdascale-chaos-"))
    with ExitStack() as stack:
        bed, without = None, ""
        try:
            bed = stack.enter_context(harness.network())
        except ConfigError as error:
            without = str(error)
            say(f"without faults of the network: {without}")
        results = Results(settings, without)
        uvloop.run(_measure(directory, bed, results, say))
    if not settings.directory and all(run.is_good for run in results.runs):
        shutil.rmtree(directory)
    else:
        say(f"logs are in {directory}")
    return results


async def _measure(
    directory: Path, bed: Testbed | None, results: Results, say: Callable[[str], None]
) -> None:
    settings = results.settings
    checkpoint = directory / "model"
    make_checkpoint(checkpoint, MODEL)
    asked = prompts(settings.seed)
    right = await asyncio.to_thread(answers, checkpoint, asked, settings.tokens)
    kinds = tuple(Kind) if bed else SIGNALS
    async with harness.running(directory / "cluster", checkpoint, bed, say) as up:
        await _until_well(up)
        for seed in range(settings.seed, settings.seed + settings.runs):
            faults = draw(
                seed,
                harness.roles(),
                kinds=kinds,
                within_s=WITHIN_S,
                lasting_s=settings.lasting_s,
            )
            run = Run(seed, faults, time.monotonic(), up.gateways, settings.silence_s)
            results.runs.append(run)
            say(f"seed {seed}: {'; '.join(map(str, faults))}")
            await _torment(up, run, list(zip(asked, right, strict=True)))
            say(f"seed {seed}: {outcome(run)}")
            if run.well_s is None:
                say("the cluster is not well again, so there are no more runs")
                return


async def _torment(
    up: Harness, run: Run, asked: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    client = Client(harness.MODEL, up.cluster.state.gateway_urls, run.silence_s)
    up.watch.arrivals.clear()

    async def send(number: int, at_s: float) -> None:
        await asyncio.sleep(run.began_at + at_s - time.monotonic())
        prompt, right = asked[number % len(asked)]
        request = Request(f"chaos-{run.seed}-{number}-{new_id('key')}", prompt, right)
        run.answers.append(await client.ask(request, number))

    async def suffer(fault: Fault) -> None:
        await asyncio.sleep(run.began_at + fault.at_s - time.monotonic())
        await up.suffer(fault)

    async with asyncio.TaskGroup() as group:
        for fault in run.faults:
            group.create_task(suffer(fault))
        for number in range(AT_ONCE):
            group.create_task(send(number, 0.0))
        for number in range(round(PER_S * FOR_S)):
            group.create_task(send(AT_ONCE + number, number / PER_S))
    ended = time.monotonic()
    if any(fault.kind is Kind.NOTICE for fault in run.faults):
        run.gaps_s = [answer.longest_gap for answer in run.answers]
    for fault in run.faults:
        if alone(fault, run.faults):
            at = run.began_at + fault.at_s
            run.stalls_s[fault] = [gap for answer in run.answers if (gap := answer.gap_over(at))]
            if silence := _silence(up, at):
                run.silences_s[fault] = silence
    if await _until_well(up):
        run.well_s = time.monotonic() - ended


def _silence(up: Harness, at: float) -> float:
    """Seconds after a time until the next block arrived, in an event that ran then; 0: none did."""
    times: dict[EventId, list[float]] = {}
    for arrival in up.watch.arrivals:
        times.setdefault(arrival.event, []).append(up.watch.monotonic(arrival.ready_ns))
    return min(
        (
            min(t for t in came if t > at) - at
            for came in times.values()
            if min(came) <= at < max(came)
        ),
        default=0.0,
    )


async def _until_well(up: Harness) -> bool:
    """Waits until every process runs, planner and registry answer, and one replica is left."""
    try:
        async with asyncio.timeout(WELL_S):
            while not await _is_well(up):  # noqa: ASYNC110 - nobody tells us
                await asyncio.sleep(0.2)
        return True
    except TimeoutError:
        return False


async def _is_well(up: Harness) -> bool:
    if any(process.state != "running" for process in up.cluster.state.processes):
        return False
    try:
        await up.bus.request(
            subjects.PLANNER_STATE, PlannerQuery(events=0), PlannerState, timeout=1.0
        )
        pool = await read_pool(partial(up.bus.request, timeout=1.0))
    except BusError:
        return False
    there = len(pool.nodes) == harness.NODES
    return there and len(up.watch.replicas) == len(up.watch.instances) == 1


def outcome(run: Run) -> str:
    """One line about a run."""
    counts = [f"{run.count(end)} {end.value}" for end in End if run.count(end)]
    tries = sum(answer.tries > 1 for answer in run.answers)
    well = "not well again" if run.well_s is None else f"well after {run.well_s:.1f} s"
    return f"{', '.join(counts)}; {tries} came again, {run.hung} hung; {well}"


def prompts(seed: int) -> list[tuple[int, ...]]:
    """Token ids of MODEL."""
    rng = random.Random(seed)
    return [
        tuple(rng.randrange(3, MODEL.vocab_size) for _ in range(PROMPT_TOKENS))
        for _ in range(PROMPTS)
    ]


def answers(checkpoint: Path, asked: list[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """Greedy answers of `count` tokens by transformers."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        rows = model.generate(
            torch.tensor(asked),
            attention_mask=torch.ones(len(asked), PROMPT_TOKENS, dtype=torch.long),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return [tuple(row[PROMPT_TOKENS:].tolist()) for row in rows]
