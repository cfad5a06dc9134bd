"""What the figures say: the engine beside transformers, and beside what the device can do."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.gpu.scale import Sizes, raw_config, scale_of
from services.node.checkpoints.config import ModelConfig

TOKENS_PER_S, MILLISECONDS = "tokens/s", "ms"
OF_MEMORY = 0.75
OF_PRODUCT = 0.55
OF_COPY = 0.9
OVER_PEER = 3.0

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case. Rates are better when larger, times when smaller."""

    name: str
    unit: str
    ours: float
    peer: float | None = None
    """transformers' value."""
    limit: float | None = None
    """What the device allows, measured in the same run."""
    over_peer: float = 0.0
    of_limit: float = 0.0
    """The bars: how many times the peer's value, and what share of the limit it must be at
    least."""

    @property
    def ratio(self) -> float | None:
        """How many times as good as the peer."""
        if self.peer is None:
            return None
        return self.peer / self.ours if self.unit == MILLISECONDS else self.ours / self.peer

    @property
    def share(self) -> float | None:
        return None if self.limit is None else self.ours / self.limit

    @property
    def missed(self) -> bool:
        ratio, share = self.ratio, self.share
        under = ratio is not None and ratio < self.over_peer
        return under or (share is not None and share < self.of_limit)

    def row(self, device: str) -> dict[str, object]:
        return {
            "case": self.name,
            "device": device,
            "ours": _rounded(self.ours),
            "peer": _rounded(self.peer),
            "unit": self.unit,
            "ratio": _rounded(self.ratio),
            "limit": _rounded(self.limit),
            "of_limit": _rounded(self.share),
        }


def of_device(limits: Figures) -> Iterator[Case]:
    if "memory" in limits:
        yield Case(name="memory", unit="GB/s", ours=limits["memory"] / 1e9)
    if "product" in limits:
        yield Case(name="large product, bf16", unit="TFLOP/s", ours=limits["product"] / 1e12)
    if "load" in limits:
        yield Case(
            name="load, host to device", unit="GB/s", ours=limits["load"] / 1e9,
            limit=limits["plain copy"] / 1e9, of_limit=OF_COPY,
        )  # fmt: skip


def of_model(shape: str, limits: Figures, ours: Figures, peer: Figures) -> Iterator[Case]:
    """The cases whose figures are there."""
    scale, sizes = scale_of(shape), Sizes(ModelConfig.from_hf(raw_config(shape)))

    def decode(name: str, batch: int, prompt: int) -> tuple[float | None, float | None]:
        """(transformers' tokens/s, tokens/s that memory allows if weights and all KV are read)."""
        theirs = batch / peer[name] if name in peer else None
        kv = batch * (prompt + scale.steps // 2) * sizes.position
        limit = batch * limits["memory"] / (sizes.read + kv) if "memory" in limits else None
        return theirs, limit

    def case(name: str, unit: str, value: float, **of: float | None) -> Case:
        known = {key: known for key, known in of.items() if known is not None}
        return Case(name=f"{name}, {shape}", unit=unit, ours=value, **known)

    one, many = "decode one", "decode many"
    if one in ours:
        theirs, limit = decode(one, 1, scale.prompt)
        yield case(
            "decode, batch 1", TOKENS_PER_S, 1 / ours[one],
            peer=theirs, limit=limit, of_limit=OF_MEMORY,
        )  # fmt: skip
    if many in ours:
        theirs, limit = decode(many, scale.batch, scale.batch_prompt)
        yield case(
            f"decode, batch {scale.batch}", TOKENS_PER_S, scale.batch / ours[many],
            peer=theirs, limit=limit, over_peer=OVER_PEER,
        )  # fmt: skip
    if "draw many" in ours:
        value = scale.batch / ours["draw many"]
        yield case(f"decode, batch {scale.batch}, at random", TOKENS_PER_S, value)
    if "first token" in ours:
        seconds, theirs = ours["first token"], peer.get("first token")
        flops = 2.0 * sizes.multiplied * scale.prompt
        peak = limits["product"] / 1e12 if "product" in limits else None
        yield case(
            "prefill", "TFLOP/s", flops / seconds / 1e12,
            peer=flops / theirs / 1e12 if theirs else None, limit=peak, of_limit=OF_PRODUCT,
        )  # fmt: skip
        yield case(
            f"TTFT, a prompt of {scale.prompt} tokens", MILLISECONDS, seconds * 1e3,
            peer=theirs * 1e3 if theirs else None,
        )  # fmt: skip
    for name, batch in ((one, 1), (many, scale.batch)):
        if name in ours and (two := f"{name}, two stages") in ours:
            cost = (ours[two] - ours[name]) * 1e3
            yield case(f"hand-over between stages, batch {batch}", MILLISECONDS, cost)
    if "warm-up" in ours:
        yield case("warm-up", "s", ours["warm-up"])


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
