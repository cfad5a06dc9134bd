"""What the host tier of KV saves a node whose KV is too small, beside the same node without it.

Run: .venv/bin/python -m benchmarks.kv_host [--tokens 512,1024] [--rounds 3], some minutes. One real
engine under its scheduler, on one thread; both ways take turns. Times are the processor's, so that
other programs on the machine do not count. A sequence of N tokens is *resumed* after it was
preempted and others have taken its pages: the time from when they end to its next token. Then three
loads that need more KV than there is: long answers, for which sequences are preempted; and prompts
that begin alike, whose common beginnings do not all fit, first with short prompts behind them, then
with long ones. Bars: to resume by copying takes a tenth of the time; no load loses more than 3 % of
its tokens/s by the tier.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.engine.ours import Answer, Ours
from benchmarks.machine import machine
from benchmarks.multicast.bars import Bar
from services.local.demo_model import CheckpointSpec, make_checkpoint
from services.node.checkpoints.store import Imported, Store
from services.node.core.kv import PAGE
from services.node.core.load import WorkerLoad

MODEL = CheckpointSpec(
    layers=8, hidden=512, intermediate=1408, heads=8, kv_heads=4, vocab_size=4096,
    context_length=4096,
)  # fmt: skip
HOST_BYTES = 2 << 30
WAYS = {"computed": 0, "copied": HOST_BYTES}
RATIO, LOST = 0.1, 0.03


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, of which at most `at_once` run and wait."""

    what: str
    positions: int
    """How many positions of KV the engine has memory for."""
    prompts: Sequence[Sequence[int]]
    tokens: int
    """How many tokens each answer has."""
    at_once: int


def made(store: Store, imported: Imported, positions: int, host: int, slots: int = 8) -> Ours:
    ours = Ours(store, imported, slots=slots, threads=1, positions=positions, kv_host_bytes=host)
    for length in (1, 64, 256, 511):  # the speed of prefill is known by what has run
        ours.first(prompt(length, seed=length))
    return ours


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(MODEL.vocab_size), k=length)


def resumed_s(ours: Ours, tokens: int) -> float:
    """The time in which a preempted sequence of `tokens` tokens goes on. It is preempted because an
    older sequence grows, which then takes all its pages and ends."""
    before = ours.steps.load.preemptions
    old = ours.submit(prompt(16, seed=1), tokens)
    while not old.came:
        ours.sweep()
    young = ours.submit(prompt(tokens - 64, seed=2), 128)
    while len(old.came) < tokens:
        ours.sweep()
    assert ours.steps.load.preemptions == before + 1
    had, began = len(young.came), time.process_time()
    while len(young.came) == had:
        ours.sweep()
    took = time.process_time() - began
    while len(young.came) < 128:
        ours.sweep()
    return took


def tokens_per_s(ours: Ours, load: Load) -> float:
    waiting, answers = list(load.prompts), list[Answer]()
    began = time.process_time()
    while waiting or any(len(answer.came) < load.tokens for answer in answers):
        running = sum(len(answer.came) < load.tokens for answer in answers)
        if waiting and running < load.at_once and not ours.steps.load.waiting:
            answers.append(ours.submit(waiting.pop(), load.tokens))
        else:
            ours.sweep()
    return len(answers) * load.tokens / (time.process_time() - began)


def loads() -> list[Load]:
    beginnings = [prompt(1024, seed) for seed in range(6)]

    def asked(own: int, count: int) -> list[list[int]]:
        return [[*beginnings[i % 6], *prompt(own, 100 + i)] for i in range(count)]

    return [
        Load("long answers", 1280, [prompt(256, i) for i in range(8)], 128, 6),
        Load("common beginnings, short prompts", 3072, asked(32, 18), 16, 2),
        Load("common beginnings, long prompts", 4096, asked(256, 12), 16, 2),
    ]


def told(load: WorkerLoad) -> str:
    tier = load.host_tier
    return (
        f"{load.preemptions} preempted, {tier.saved} pages saved, {tier.restored} brought back "
        f"({tier.used >> 20} MiB held)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="512,1024")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(machine())
    bars = []
    with tempfile.TemporaryDirectory() as text:
        make_checkpoint(Path(text) / "base", MODEL)
        store = Store(Path(text) / "store")
        imported = store.import_checkpoint(Path(text) / "base")
        for tokens in map(int, args.tokens.split(",")):
            took: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(args.rounds):
                for way, host in WAYS.items():
                    ours = made(store, imported, tokens + 6 * PAGE, host)
                    took[way].append(resumed_s(ours, tokens))
            computed, copied = (median(took[way]) for way in WAYS)
            ratio = copied / computed
            print(
                f"{tokens} tokens are resumed in {computed * 1e3:.0f} ms computed, "
                f"{copied * 1e3:.1f} ms copied"
            )
            bars.append(Bar(f"copied / computed: {ratio:.3f} (bar {RATIO})", ratio <= RATIO))
        for load in loads():
            rates: dict[str, list[float]] = {way: [] for way in WAYS}
            last: dict[str, WorkerLoad] = {}
            for _ in range(args.rounds):
                for way, host in WAYS.items():
                    ours = made(store, imported, load.positions, host)
                    rates[way].append(tokens_per_s(ours, load))
                    last[way] = ours.steps.load
            off, on = (median(rates[way]) for way in WAYS)
            print(f"{load.what}: {off:.1f} tokens/s without, {on:.1f} with ({on / off:.2f} times)")
            for way, found in last.items():
                print(f"  {way}: {told(found)}")
            bars.append(
                Bar(f"{load.what}: {on / off:.2f} times the tokens/s", on >= off * (1 - LOST))
            )
    for bar in bars:
        print(bar)


if __name__ == "__main__":
    main()
