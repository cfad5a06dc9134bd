"""The measurements of a source that serves, the bar that they are held to, and both in words."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from benchmarks.machine import machine
from benchmarks.multicast.bars import Bar

OURS, PLAIN = "lambdascale", "plain socket"
HALF, WHOLE = "half", "whole"
MOST_LOST = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    link_mbit: float
    nbytes: int
    blocks: int
    batch: int
    """Sequences that are decoded at once."""
    window_s: float
    """Least seconds for which tokens are counted."""
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A period in which tokens were counted."""

    took_s: float
    tokens_per_s: float
    bytes_per_s: float
    """Rate from the source's host to the target's."""
    node_cores: float
    """CPU seconds of the source's process, per second."""
    machine_cores: float
    """CPU seconds of everything on the machine, others' work included, per second."""


@dataclass(frozen=True, slots=True)
class Sample:
    before: Window
    loading: Window
    after: Window

    @property
    def loss(self) -> float:
        """The share of tokens/s lost while loading, against the mean of just before and just after;
        0 to 1."""
        alone = (self.before.tokens_per_s + self.after.tokens_per_s) / 2
        return 1 - self.loading.tokens_per_s / alone


@dataclass(slots=True)
class Row:
    """One way of loading at one rate."""

    link: str
    """The share of the link that the bytes may use: HALF, paced, or WHOLE, as fast as it goes."""
    way: str
    rate: float
    """bytes/s that it is paced to or, for the whole link, that the link has."""
    samples: list[Sample] = field(default_factory=list)
    """One for each round."""

    @property
    def loss(self) -> float:
        return median(sample.loss for sample in self.samples)

    @property
    def alone(self) -> float:
        """tokens/s before."""
        return median(sample.before.tokens_per_s for sample in self.samples)

    @property
    def loading(self) -> float:
        """tokens/s meanwhile."""
        return median(sample.loading.tokens_per_s for sample in self.samples)

    @property
    def again(self) -> float:
        """tokens/s after."""
        return median(sample.after.tokens_per_s for sample in self.samples)

    @property
    def bytes_per_s(self) -> float:
        return median(sample.loading.bytes_per_s for sample in self.samples)

    @property
    def node_cores(self) -> tuple[float, float]:
        """(alone, meanwhile)."""
        samples = self.samples
        return median(s.before.node_cores for s in samples), median(
            s.loading.node_cores for s in samples
        )

    @property
    def machine_cores(self) -> float:
        return median(sample.loading.machine_cores for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Results:
    settings: Settings
    nbytes: int
    """Bytes of the model that was served and moved."""
    rows: tuple[Row, ...]


def bar(results: Results) -> Bar:
    """The bar, for loading that is paced to half the link."""
    (row,) = (row for row in results.rows if (row.link, row.way) == (HALF, OURS))
    what = f"tokens/s lost while loading at half the link: {row.loss:.1%}"
    return Bar(f"{what}, less than {MOST_LOST:.0%}", row.loss < MOST_LOST)


def document(results: Results) -> dict[str, object]:
    """The results as `--json` prints them."""
    return {
        "rows": [
            {
                "link": row.link,
                "way": row.way,
                "rate_bytes_per_s": round(row.rate),
                "load_bytes_per_s": round(row.bytes_per_s),
                "tokens_per_s": round(row.alone, 1),
                "loading_tokens_per_s": round(row.loading, 1),
                "again_tokens_per_s": round(row.again, 1),
                "loss": round(row.loss, 4),
                "losses": [round(sample.loss, 4) for sample in row.samples],
                "node_cores": [round(cores, 3) for cores in row.node_cores],
                "machine_cores": round(row.machine_cores, 3),
                "rounds": len(row.samples),
            }
            for row in results.rows
        ],
        "link_mbit": results.settings.link_mbit,
        "bytes": results.nbytes,
        "batch": results.settings.batch,
        "machine": machine(),
    }


def table(results: Results) -> Iterator[str]:
    """The results for people."""
    settings = results.settings
    yield (
        f"{results.nbytes / (1 << 20):.1f} MiB, {settings.batch} sequences at once on one engine "
        f"thread; links of {settings.link_mbit:g} Mbit/s; medians of {settings.rounds}"
    )
    yield machine()
    yield (
        f"{'of the link':<11}  {'way':<12}  {'tokens/s':>8} {'loading':>8} {'again':>8}  "
        f"{'lost':>6}  {'spread':>15}  {'MB/s':>6} {'of rate':>7}  {'node cores':>12}  machine"
    )
    for row in results.rows:
        losses = [sample.loss for sample in row.samples]
        spread = f"{min(losses):.1%} .. {max(losses):.1%}"
        alone, loading = row.node_cores
        yield (
            f"{row.link:<11}  {row.way:<12}  {row.alone:>8.1f} {row.loading:>8.1f} "
            f"{row.again:>8.1f}  {row.loss:>6.1%}  {spread:>15}  "
            f"{row.bytes_per_s / 1e6:>6.1f} {row.bytes_per_s / row.rate:>7.3f}  "
            f"{f'{alone:.2f} -> {loading:.2f}':>12}  {row.machine_cores:>7.2f}"
        )
