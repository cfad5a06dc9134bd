import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.node.engine import kv as kv_module
from services.node.engine.kv import GRANULE, KvCache, Reservation, Sequence, round_up
from shared.errors import CapacityExceeded, NotFound
from shared.ids import ModelId

MODEL, STAGE = ModelId("m"), (0, 3)


def cache(capacity: int = 64, sequences: int = 256) -> KvCache:
    """With slots to round up the limits of so many sequences; fewer fragment sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_module, "ROUNDING_SLOTS", sequences * GRANULE)
        kv = KvCache(capacity, torch.device("cpu"))
        kv.open_model(MODEL, 2, n_kv_heads=1, head_dim=2, dtype=torch.float32)
    return kv


def reserve(kv: KvCache, *wanted: tuple[str, int], layers: range = range(2)) -> None:
    kv.reserve(MODEL, STAGE, layers, [Reservation(*one) for one in wanted])


def write(kv: KvCache, key: str, count: int, value: float) -> None:
    """Fills the next `count` positions, as a step would."""
    sequence = found(kv, key)
    start = sequence.first + sequence.length
    kv.extend(sequence, count)
    kv.tensor(MODEL)[:, start : start + count] = value


def found(kv: KvCache, key: str) -> Sequence:
    sequence = kv.find(key)
    assert sequence is not None
    return sequence


def read(kv: KvCache, key: str) -> torch.Tensor:
    """[layers, whole granules, ...] as attention reads it."""
    sequence = found(kv, key)
    return kv.tensor(MODEL)[:, sequence.first : sequence.first + round_up(sequence.length)]


def test_the_budget_counts_limits() -> None:
    kv = cache(capacity=64)
    reserve(kv, ("a", 40), ("b", 24))
    assert kv.used == 64
    with pytest.raises(CapacityExceeded, match="1 positions"):
        reserve(kv, ("c", 1))
    kv.free(("a", "unknown"))
    assert kv.used == 24
    reserve(kv, ("c", 40))


def test_all_or_none() -> None:
    kv = cache(capacity=64)
    with pytest.raises(CapacityExceeded):
        reserve(kv, ("a", 40), ("b", 40))
    assert kv.used == 0
    assert kv.find("a") is None


def test_rounding_costs_no_budget() -> None:
    kv = cache(capacity=40)
    reserve(kv, *((f"s{i}", 1) for i in range(40)))
    assert kv.used == 40


def test_stages_without_layers_cost_nothing() -> None:
    kv = cache(capacity=8)
    reserve(kv, ("a", 1000), layers=range(0))
    assert kv.used == 0
    kv.extend(found(kv, "a"), 5)
    assert found(kv, "a").length == 5


def test_fragments_are_joined() -> None:
    """The free positions suffice, but not in one piece."""
    kv = cache(capacity=512, sequences=0)
    reserve(kv, *((f"s{i}", 64) for i in range(8)))
    for i in range(8):
        write(kv, f"s{i}", 20 + i, float(i))
    kv.free(("s0", "s2", "s4", "s6"))
    reserve(kv, ("long", 256))
    assert kv.used == 512
    for i in (1, 3, 5, 7):
        assert (read(kv, f"s{i}")[:, : 20 + i] == i).all()


def test_nothing_foreign_is_read() -> None:
    """Even a weight of 0 does not make a NaN harmless."""
    kv = cache()
    reserve(kv, ("bad", 64))
    write(kv, "bad", 64, float("nan"))
    kv.free(("bad",))
    reserve(kv, ("good", 64))
    for _ in range(40):
        write(kv, "good", 1, 1.0)
        assert read(kv, "good").isfinite().all()


def test_closing_a_model_frees_its_sequences() -> None:
    kv = cache()
    reserve(kv, ("a", 10))
    kv.close_model(MODEL)
    assert kv.used == 0
    with pytest.raises(NotFound):
        reserve(kv, ("a", 10))


def test_memory_that_cannot_be_had() -> None:
    kv = KvCache(1 << 40, torch.device("cpu"))
    with pytest.raises(CapacityExceeded, match=r"node\.kv_tokens"):
        kv.open_model(MODEL, 100, n_kv_heads=100, head_dim=128, dtype=torch.float32)


Steps = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 200)), max_size=60)


@given(Steps)
def test_sequences_never_overlap_nor_leak(steps: list[tuple[int, int]]) -> None:
    """Each step ends the sequence of that name, or starts it with that limit."""
    kv = cache(capacity=600, sequences=10)
    live: dict[str, int] = {}
    for number, limit in steps:
        key = f"s{number}"
        if key in live:
            assert (read(kv, key)[:, : live.pop(key)] == number).all()
            kv.free((key,))
        elif sum(live.values()) + limit <= 600:
            reserve(kv, (key, limit))
            write(kv, key, limit, float(number))
            live[key] = limit
        else:
            with pytest.raises(CapacityExceeded):
                reserve(kv, (key, limit))
        assert kv.used == sum(live.values())
        for other, length in live.items():
            assert (read(kv, other)[:, :length] == int(other[1:])).all()
            assert found(kv, other).first % GRANULE == 0
    kv.free(tuple(live))
    assert kv.used == 0
