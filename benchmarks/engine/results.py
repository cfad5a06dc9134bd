"""The measurements of the engine, the bars that they are held to, and both in words."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

from benchmarks.engine.llama_peer import NAME as LLAMA_CPP
from benchmarks.machine import machine
from benchmarks.multicast.bars import Bar

DECODE_ONE = "decode, batch 1"
PREFILL = "prefill"
OVERHEAD = "engine overhead"
PREFIX = "shared prefix, second request"
SWEEP = "one sweep for four block ranges"
SPECULATION = "an answer that repeats itself"
TOKENS_PER_S = "tokens/s"
MILLISECONDS = "ms"

OVER_PEER_ONE = 1.3
OVER_PEER_BATCH = 2.0
OVER_PEER_PREFILL = 1.0
OVER_LLAMA_CPP = 1.0
OF_ROOFLINE = 0.75
MOST_OVERHEAD = 0.10
MOST_PREFIX = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    layers: int
    hidden: int
    vocab: int
    dtypes: tuple[str, ...]
    batch: int
    """Sequences of the large decode batch."""
    prompt: int
    """Tokens of the longest prompt, and of the prefill."""
    tokens: int
    """Decode steps of each case in a round."""
    rounds: int
    threads: int
    """0: torch's default."""
    peer: bool
    llama_cpp: str = ""
    """The Python that has llama.cpp; empty: llama.cpp is left out."""


@dataclass(slots=True)
class Row:
    """One case, with a value for each round. A rate is better when larger, a time when smaller."""

    case: str
    dtype: str
    unit: str
    ours: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)
    """By the peer's name."""
    limits: list[float] = field(default_factory=list)
    """What the machine allows, or what `ours` is a part of, measured in the same rounds."""
    device: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.case}, {self.dtype}"

    @property
    def value(self) -> float:
        return median(self.ours)

    @property
    def peer(self) -> tuple[str, float] | None:
        """The best peer, and its value."""
        return self.best_of(self.peers)

    def best_of(self, names: Iterable[str]) -> tuple[str, float] | None:
        best = max if self.unit == TOKENS_PER_S else min
        values = {name: median(values) for name in names if (values := self.peers.get(name))}
        return best(values.items(), key=lambda item: item[1]) if values else None

    @property
    def ratio(self) -> float | None:
        """How many times as good as the best peer."""
        return None if self.peer is None else self.ratio_to(self.peer[1])

    def ratio_to(self, value: float) -> float:
        return self.value / value if self.unit == TOKENS_PER_S else value / self.value

    @property
    def limit(self) -> float | None:
        return median(self.limits) if self.limits else None

    @property
    def of_limit(self) -> float | None:
        return None if self.limit is None else self.value / self.limit


@dataclass(frozen=True, slots=True)
class Results:
    settings: Settings
    parameters: int
    threads: int
    bandwidth: float
    """bytes/s that the machine reads from memory, median of the rounds."""
    rows: tuple[Row, ...]
    without: tuple[str, ...] = ()
    """The reasons why peers are missing."""


def batched(batch: int) -> str:
    return f"decode, batch {batch}, mixed lengths"


def bars(results: Results) -> Iterator[Bar]:
    """The bars for which there are measured rows."""
    for row in results.rows:
        least = {
            DECODE_ONE: OVER_PEER_ONE,
            batched(results.settings.batch): OVER_PEER_BATCH,
            PREFILL: OVER_PEER_PREFILL,
        }.get(row.case)
        if least is not None:
            yield from _beside(row, row.peers.keys() - {LLAMA_CPP}, least)
            yield from _beside(row, [LLAMA_CPP], OVER_LLAMA_CPP)
        if (share := row.of_limit) is None:
            continue
        if row.case == DECODE_ONE:
            what = f"{row.name}: {share:.0%} of the roofline, at least {OF_ROOFLINE:.0%}"
            yield Bar(what, share >= OF_ROOFLINE)
        elif row.case == OVERHEAD:
            what = f"{row.name}: {share:.1%} of the step, at most {MOST_OVERHEAD:.0%}"
            yield Bar(what, share <= MOST_OVERHEAD)
        elif row.case == PREFIX:
            what = f"{row.name}: TTFT {share:.1%} of the first's, at most {MOST_PREFIX:.0%}"
            yield Bar(what, share <= MOST_PREFIX)


def _beside(row: Row, peers: Iterable[str], least: float) -> Iterator[Bar]:
    """The bar beside the best of these peers, if one was measured."""
    if (best := row.best_of(peers)) is not None:
        name, value = best
        ratio = row.ratio_to(value)
        yield Bar(f"{row.name}: {ratio:.2f} x {name}, at least {least:.1f}", ratio >= least)


def document(results: Results) -> dict[str, object]:
    """The results as `--json` prints them."""
    return {
        "rows": [
            {
                "case": row.name,
                "device": row.device,
                "ours": _rounded(row.value),
                "peer": _rounded(row.peer[1]) if row.peer else None,
                "unit": row.unit,
                "ratio": _rounded(row.ratio),
                "limit": _rounded(row.limit),
                "of_limit": _rounded(row.of_limit),
                "peer_name": row.peer[0] if row.peer else None,
                "peers": {name: _rounded(median(found)) for name, found in row.peers.items()},
                "rounds": len(row.ours),
            }
            for row in results.rows
        ],
        "parameters": results.parameters,
        "threads": results.threads,
        "bandwidth_bytes_per_s": round(results.bandwidth),
        "machine": machine(),
    }


def table(results: Results) -> Iterator[str]:
    """The results for people."""
    settings = results.settings
    yield (
        f"{results.parameters / 1e6:.1f}M parameters, {results.threads} threads; memory is read at "
        f"{results.bandwidth / 1e9:.1f} GB/s; medians of {settings.rounds} rounds"
    )
    yield machine()
    for reason in results.without:
        yield f"no peer: {reason}"
    width = max(len(row.name) for row in results.rows)
    yield (
        f"{'case':<{width}}  {'unit':<8}  {'ours':>8} {'spread':>17}  {'peer':>8} {'ratio':>6}  "
        f"{'limit':>8} {'of it':>6}  of peers the best"
    )
    for row in results.rows:
        spread = f"{min(row.ours):.1f} .. {max(row.ours):.1f}"
        yield (
            f"{row.name:<{width}}  {row.unit:<8}  {row.value:>8.1f} {spread:>17}  "
            f"{_cell(row.peer and row.peer[1], '.1f'):>8} {_cell(row.ratio, '.2f'):>6}  "
            f"{_cell(row.limit, '.1f'):>8} {_cell(row.of_limit, '.2f'):>6}  "
            f"{row.peer[0] if row.peer else ''}"
        ).rstrip()


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
