"""The engine beside transformers, in one process, and beside llama.cpp, in another: the same
checkpoint, threads and prompts.

A Llama with random weights is made for the run. Every round measures every case of every side once,
so that a drift of the machine affects all sides alike.
"""

import gc
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.engine import llama_peer
from benchmarks.engine import peer as peers
from benchmarks.engine.memory import Memory
from benchmarks.engine.ours import STEP_TOKENS, Ours
from benchmarks.engine.ranges import Ranges
from benchmarks.engine.results import (
    DECODE_ONE,
    MILLISECONDS,
    OVERHEAD,
    PREFILL,
    PREFIX,
    SPECULATION,
    SWEEP,
    TOKENS_PER_S,
    Results,
    Row,
    Settings,
    batched,
)
from services.local.demo_model import CheckpointSpec, make_checkpoint
from services.node.checkpoints.store import Store
from services.node.engine.attention import AttentionStep
from services.node.engine.kernels import Kernels
from services.node.engine.linear import Form, Stored
from services.node.engine.ops import TorchOps
from shared.config import NodeConfig
from shared.errors import BadInput
from shared.messages.serving import LogitRules

HEAD_DIM, GROUP = 64, 3
"""As in small Llamas: three query heads share a KV head."""
PREFIX_TOKENS = 1000
OWN_TOKENS = 8
"""Tokens of each prompt after the shared prefix."""
CONTEXT = 4096
HELD = {"int8": "bfloat16"}
"""The checkpoint's dtype, where the engine rounds the weights as it packs them."""
REPEATING = LogitRules(frequency_penalty=-2.0)
"""Rewards repetition, so that a model with random weights gives an answer that repeats itself."""
COMPUTING: tuple[tuple[type, str], ...] = (
    (Kernels, "run"),
    (Stored, "__call__"),
    *((TorchOps, method) for method in ("rms_norm", "silu_times")),
    (AttentionStep, "run"),
)
"""Methods that only compute, and do not call each other."""


def measure(settings: Settings, say: Callable[[str], None]) -> Results:
    """Runs the benchmark. BadInput for a model or requests that are impossible."""
    if settings.prompt + settings.tokens > CONTEXT // 2:
        raise BadInput(f"--prompt and --tokens: more than {CONTEXT // 2} positions together")
    if settings.hidden % (GROUP * HEAD_DIM):
        raise BadInput(f"--hidden: {settings.hidden} is not a multiple of {GROUP * HEAD_DIM}")
    without = peers.missing() if settings.peer else "left out (--no-peer)"
    missing = [without] if without else []
    if settings.llama_cpp:
        llama_peer.check(settings.llama_cpp)
    else:
        missing.append("llama.cpp is left out (--llama-cpp PYTHON measures it)")
    for reason in missing:
        say(f"no peer: {reason}")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    memory = Memory()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="lambdascale-bench-") as folder:
        for dtype in settings.dtypes:
            say(f"making the model in {dtype}")
            checkpoint, held = Path(folder) / dtype, HELD.get(dtype, dtype)
            make_checkpoint(checkpoint, replace(spec(settings), dtype=getattr(torch, held)))
            store = Store(Path(folder) / f"store-{dtype}")
            imported = store.import_checkpoint(checkpoint)
            threads = torch.get_num_threads()
            form: Form = "int8" if dtype == "int8" else "packed"
            ours = Ours(store, imported, slots=settings.batch + 1, threads=threads, form=form)
            most = NodeConfig().speculation
            speculating = Ours(
                store, imported, slots=1, threads=threads, form=form, speculation=most
            )
            peer = None if without or dtype in HELD else peers.Peer(checkpoint, dtype)
            llama = _llama(settings, checkpoint, dtype, threads) if settings.llama_cpp else None
            cases = Cases(settings, dtype, ours, speculating, peer, llama, memory)
            gc.collect()
            gc.freeze()  # no node has transformers' objects to look through
            for number in range(-1, settings.rounds):
                cases.run(warm=number < 0)
                if number >= 0:
                    say(f"{dtype}: round {number + 1} of {settings.rounds}")
            rows += cases.rows
            parameters = (
                sum(tensor.nbytes for block in imported.manifest.blocks for tensor in block.tensors)
                // getattr(torch, held).itemsize
            )
            if llama is not None:
                llama.close()
    return Results(
        settings, parameters, torch.get_num_threads(), memory.bandwidth, tuple(rows), tuple(missing)
    )


def _llama(settings: Settings, checkpoint: Path, dtype: str, threads: int) -> llama_peer.LlamaCpp:
    return llama_peer.LlamaCpp(
        settings.llama_cpp,
        checkpoint,
        dtype,
        threads=threads,
        sequences=settings.batch,
        length=settings.prompt + settings.tokens,
    )


def spec(settings: Settings) -> CheckpointSpec:
    heads = settings.hidden // HEAD_DIM
    return CheckpointSpec(
        layers=settings.layers,
        hidden=settings.hidden,
        intermediate=settings.hidden * 8 // 3,
        heads=heads,
        kv_heads=heads // GROUP,
        vocab_size=settings.vocab,
        context_length=CONTEXT,
    )


def timed(kind: type, method: str, seconds: list[float]) -> Callable[..., Any]:
    """The method, which records in `seconds` how long each call took."""
    original = getattr(kind, method)

    def call(*arguments: Any) -> Any:
        began = time.perf_counter()
        result = original(*arguments)
        seconds.append(time.perf_counter() - began)
        return result

    return call


class Cases:
    """Everything that is measured of one model."""

    def __init__(
        self,
        settings: Settings,
        dtype: str,
        ours: Ours,
        speculating: Ours,
        peer: peers.Peer | None,
        llama: llama_peer.LlamaCpp | None,
        memory: Memory,
    ) -> None:
        """`speculating`: the same engine again, with speculation."""
        self._settings, self._ours, self._peer, self._memory = settings, ours, peer, memory
        self._speculating, self._llama = speculating, llama
        self._random = random.Random(0)
        self._ranges = Ranges(ours)
        self._rows: dict[str, Row] = {}
        for case, unit in (
            (DECODE_ONE, TOKENS_PER_S),
            (batched(settings.batch), TOKENS_PER_S),
            (PREFILL, TOKENS_PER_S),
            (OVERHEAD, MILLISECONDS),
            (PREFIX, MILLISECONDS),
            (SWEEP, MILLISECONDS),
            (SPECULATION, TOKENS_PER_S),
        ):
            self._rows[case] = Row(case, dtype, unit)

    @property
    def rows(self) -> Iterator[Row]:
        yield from self._rows.values()

    def run(self, *, warm: bool) -> None:
        """Runs one round. `warm`: the round is not counted."""
        self._decode()
        self._prefill()
        self._overhead()
        self._prefix()
        together, apart = self._ranges.step_s()
        row = self._rows[SWEEP]
        row.ours.append(together * 1e3)
        row.peers.setdefault("a sweep each", []).append(apart * 1e3)
        self._speculation()
        if warm:
            for row in self.rows:
                row.ours, row.peers, row.limits = [], {}, []

    def _decode(self) -> None:
        settings = self._settings
        lengths = {
            DECODE_ONE: [settings.prompt // 4],
            batched(settings.batch): [
                max(1, settings.prompt * (number + 1) // settings.batch)
                for number in range(settings.batch)
            ],
        }
        for case, lengths_ in lengths.items():
            row, batch = self._rows[case], len(lengths_)
            prompts = [self._prompt(length) for length in lengths_]
            times = self._ours.decode(prompts, settings.tokens)
            row.ours.append(batch / median(times))
            if case == DECODE_ONE:
                row.limits.append(self._memory.measure() / self._ours.step_bytes)
            if self._peer is not None:
                _, step_s = self._peer.generate(prompts, settings.tokens)
                row.peers.setdefault(peers.NAME, []).append(batch / step_s)
                if self._peer.batches and batch > 1:
                    step_s = self._peer.generate_batch(prompts, settings.tokens, STEP_TOKENS)
                    row.peers.setdefault(peers.BATCHING, []).append(batch / step_s)
            if self._llama is not None:
                _, step_s = self._llama.generate(prompts, settings.tokens)
                row.peers.setdefault(llama_peer.NAME, []).append(batch / step_s)

    def _prefill(self) -> None:
        row, prompt = self._rows[PREFILL], self._prompt(self._settings.prompt)
        row.ours.append(len(prompt) / self._ours.first(prompt))
        if self._peer is not None:
            first_s, _ = self._peer.generate([prompt], 1)
            row.peers.setdefault(peers.NAME, []).append(len(prompt) / first_s)
        if self._llama is not None:
            first_s, _ = self._llama.generate([prompt], 1)
            row.peers.setdefault(llama_peer.NAME, []).append(len(prompt) / first_s)

    def _overhead(self) -> None:
        """Measures the part of a decode step outside of products, attention, norms and gates.
        torch's profiler would take more than that itself, so each is timed."""
        settings = self._settings
        prompts = [self._prompt(settings.prompt // 4) for _ in range(settings.batch)]
        with self._ours.decoding(prompts, 1 + settings.tokens) as step, ExitStack() as patches:
            step()
            inside: list[float] = []
            for kind, method in COMPUTING:
                patches.enter_context(patch.object(kind, method, timed(kind, method, inside)))
            began = time.perf_counter()
            for _ in range(settings.tokens):
                step()
            took = time.perf_counter() - began
        row = self._rows[OVERHEAD]
        row.ours.append((took - sum(inside)) * 1e3 / settings.tokens)
        row.limits.append(took * 1e3 / settings.tokens)

    def _prefix(self) -> None:
        row, prefix = self._rows[PREFIX], self._prompt(PREFIX_TOKENS)
        first, second = (self._ours.first([*prefix, *self._prompt(OWN_TOKENS)]) for _ in range(2))
        row.ours.append(second * 1e3)
        row.limits.append(first * 1e3)

    def _speculation(self) -> None:
        row, prompt = self._rows[SPECULATION], self._prompt(self._settings.prompt // 4)
        tokens = 8 * self._settings.tokens
        row.ours.append(self._speculating.rate(prompt, tokens, REPEATING))
        without = self._ours.rate(prompt, tokens, REPEATING)
        row.peers.setdefault("without speculation", []).append(without)

    def _prompt(self, length: int) -> list[int]:
        return self._random.choices(range(10, self._settings.vocab), k=length)
