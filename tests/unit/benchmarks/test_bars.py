"""What a run of the multicast benchmark is held to."""

from benchmarks.multicast.bars import bars
from benchmarks.multicast.bench import Results, Row, Settings
from benchmarks.multicast.model import checkpoint_spec
from services.local.demo_model import CheckpointSpec

SETTINGS = Settings(
    nodes=(4, 8, 16),
    strategies=("auto", "chain"),
    link_mbit=400,
    nbytes=64 << 20,
    blocks=128,
    runs=3,
    racks=(),
    trunk_mbit=400,
    peers=True,
)


def row(n: int, strategy: str, ratio: float, **others: object) -> Row:
    made = Row(n, strategy, 1.0, makespans_s=[ratio - 0.01, ratio, ratio + 0.5], **others)  # type: ignore[arg-type]
    made.first_bytes_s = [0.01, 0.012, 0.5]
    return made


def broken(*rows: Row) -> list[str]:
    return [bar.what for bar in bars(Results(SETTINGS, 1, rows)) if not bar.met]


def good() -> list[Row]:
    rows = [row(n, "auto", 1.04) for n in (4, 8, 16)]
    rows += [row(n, "chain", 1.04) for n in (4, 8, 16)]
    rows += [row(n, "tree", 2.0) for n in (4, 8, 16)]
    rows += [row(8, "gloo-broadcast", 3.0), row(16, "gloo-broadcast", 4.0)]
    return [*rows, row(8, "gloo-chain", 1.08)]


def test_medians_within_all_bars() -> None:
    assert not broken(*good())


def test_each_bar_is_looked_at() -> None:
    worse = {
        ("auto", 8): (1.06, "makespan over the limit"),
        ("auto", 16): (1.10, "flat in N"),
        ("chain", 4): (1.0, "over the best of ours (chain)"),
        ("tree", 8): (1.9, "binary tree"),
        ("gloo-broadcast", 16): (3.9, "gloo-broadcast"),
        ("gloo-chain", 8): (1.03, "gloo-chain"),
    }
    for (name, n), (ratio, what) in worse.items():
        rows = [row(n, name, ratio) if (r.strategy, r.n) == (name, n) else r for r in good()]
        assert any(what in text for text in broken(*rows)), what


def test_late_first_bytes() -> None:
    late = row(4, "auto", 1.0)
    late.first_bytes_s = [0.02, 0.03, 0.001]
    assert ["first byte" in what for what in broken(late)] == [True]


def test_racks_are_held_against_taps_and_not_against_the_flat_rows() -> None:
    racks = row(8, "auto", 1.2, racks=(4, 4), bound_s=1.08)
    (over,) = broken(*good(), racks)
    assert "tap bound" in over
    assert not broken(*good(), row(8, "auto", 1.15, racks=(4, 4), bound_s=1.08))


def nbytes(spec: CheckpointSpec) -> tuple[int, int, int]:
    """Bytes of the embedding, of a layer, and of the head with its norm, at two bytes a weight."""
    head_dim = spec.hidden // spec.heads
    attention = 2 * spec.hidden * (spec.heads + spec.kv_heads) * head_dim
    layer = attention + 3 * spec.hidden * spec.intermediate + 2 * spec.hidden
    rows = spec.vocab_size * spec.hidden
    return 2 * rows, 2 * layer, 2 * (rows + spec.hidden)


def test_models_have_equal_blocks_of_the_wanted_size() -> None:
    for wanted, blocks in ((64 << 20, 128), (64 << 20, 32), (1 << 20, 8), (2 << 20, 4)):
        spec = checkpoint_spec(wanted, blocks)
        assert spec.layers + 2 == blocks
        sizes = nbytes(spec)
        assert max(sizes) <= wanted // blocks
        assert min(sizes) > 0.98 * wanted / blocks
