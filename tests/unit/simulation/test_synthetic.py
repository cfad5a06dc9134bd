"""Made-up workloads: they have the shape that was asked for, and say that they are made up."""

import itertools
import statistics
from collections import Counter
from pathlib import Path

import pytest

from shared.errors import BadInput
from simulation import synthetic
from simulation.synthetic import is_synthetic, synthesize


def gaps(text: str, seed: int = 0) -> list[float]:
    arrivals = [row.arrival_s for row in synthesize(text, seed=seed).rows]
    assert arrivals == sorted(arrivals)
    return [later - at for at, later in itertools.pairwise(arrivals)]


@pytest.mark.parametrize(
    ("text", "cv"),
    [
        ("gamma:rate=50,cv=4,seconds=1000", 4),
        ("gamma:rate=20,cv=0.5,seconds=1000", 0.5),
        ("poisson:rate=20,seconds=1000", 1),
    ],
)
def test_rate_and_variation(text: str, cv: float) -> None:
    found = gaps(text)
    rate = float(text.partition("rate=")[2].partition(",")[0])
    assert 1 / statistics.mean(found) == pytest.approx(rate, rel=0.1)
    assert statistics.pstdev(found) / statistics.mean(found) == pytest.approx(cv, rel=0.1)


def test_a_spike_out_of_nothing() -> None:
    workload = synthesize("spike:rate=50,seconds=20,idle=7,prompt=100,output=9")
    arrivals = [row.arrival_s for row in workload.rows]
    assert 7 < arrivals[0] < 8
    assert 26 < arrivals[-1] < 27
    assert len(arrivals) == pytest.approx(1000, rel=0.1)
    assert {(row.prompt_tokens, row.output_tokens) for row in workload.rows} == {(100, 9)}


def test_hours_have_their_counts(tmp_path: Path) -> None:
    (tmp_path / "counts").write_text("day,hour,api,all\n8,0,1,5\n9,1,3,70\n9,0,2,60\n")
    text = f"hourly:file={tmp_path / 'counts'},day=9,compress=60"
    arrivals = [row.arrival_s for row in synthesize(text).rows]
    assert arrivals == sorted(arrivals)
    assert sum(at < 60 for at in arrivals) == 60
    assert sum(60 <= at < 120 for at in arrivals) == 70
    assert len(synthesize(text + ",column=api").rows) == 5
    assert "compressed 60 times" in synthesize(text).notes[0]


def test_it_says_what_it_is() -> None:
    workload = synthesize("gamma:rate=4,cv=8,seconds=600,prompt=1024,output=128")
    assert workload.synthetic
    assert workload.notes == (
        "synthetic: Gamma bursts, 4 requests a second on average, CV 8, for 600 s; "
        "every prompt 1024 and every output 128 tokens",
    )


def test_the_seed_decides() -> None:
    text = "gamma:rate=4,cv=8,seconds=600"
    assert synthesize(text, seed=3) == synthesize(text, seed=3)
    assert synthesize(text, seed=3).rows != synthesize(text, seed=4).rows


def test_models_by_popularity() -> None:
    text = "poisson:rate=100,seconds=50,prompt=8,output=2"
    one, many = synthesize(text), synthesize(f"{text},models=20,skew=1")
    assert [row.arrival_s for row in many.rows] == [row.arrival_s for row in one.rows]
    assert many.notes[0].endswith("; 20 models, Zipf 1")
    counts = Counter(row.model for row in many.rows)
    assert set(counts) <= {f"synthetic-{index:02}" for index in range(20)}
    for rank, name in enumerate(("synthetic-00", "synthetic-01", "synthetic-04")):
        share = (1.0, 1 / 2, 1 / 5)[rank] / sum(1 / n for n in range(1, 21))
        assert counts[name] / len(many.rows) == pytest.approx(share, rel=0.15)
    assert synthesize(f"{text},models=20,skew=1") == many
    even = Counter(row.model for row in synthesize(f"{text},models=4").rows)
    assert min(even.values()) > 0.8 * max(even.values())
    with pytest.raises(BadInput, match="more than 10000 models"):
        synthesize(f"{text},models=10001")


def test_told_from_files() -> None:
    assert is_synthetic("spike:rate=1,seconds=1")
    assert is_synthetic("spike:")
    assert not is_synthetic("spike")
    assert not is_synthetic("C:/traces/spike.csv")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sine:rate=1", "no such kind of workload; there are gamma, poisson, spike, hourly"),
        ("gamma:rate=4", "cv, seconds must be given, as in cv="),
        ("spike:", "rate, seconds must be given"),
        ("spike:rate", "'rate' is none of its parameters: rate, seconds, idle, prompt, output"),
        ("spike:cv=3", "'cv=3' is none of its parameters"),
        ("spike:rate=fast,seconds=1", "rate=fast is not a number"),
        ("spike:rate=0,seconds=1", "rate=0 must be at least"),
        ("spike:rate=nan,seconds=1", "rate=nan must be"),
        ("spike:rate=inf,seconds=1", "rate=inf must be"),
        ("spike:rate=1,seconds=1,output=0", "output=0 must be at least 1"),
        ("spike:rate=1e-3,seconds=1", "no request falls into its time"),
        ("hourly:day=3", "file must be given"),
        ("hourly:file=/none,day=3", "/none: No such file"),
    ],
)
def test_bad_descriptions(text: str, says: str) -> None:
    with pytest.raises(BadInput) as info:
        synthesize(text)
    assert says in str(info.value)


def test_a_slip_of_the_pen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "MOST", 100)
    with pytest.raises(BadInput, match="more than 100 requests"):
        synthesize("spike:rate=1e6,seconds=100")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("day,hour,api\n9,0,1\n", "expected day,hour and all"),
        ("day,hour,all\n8,0,1\n", "has no day 9"),
        ("day,hour,all\n9,0,many\n", "expected whole numbers"),
        ("day,hour,all\n9,0\n", "expected whole numbers"),
    ],
)
def test_bad_counts(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "counts").write_text(content)
    with pytest.raises(BadInput, match=says):
        synthesize(f"hourly:file={tmp_path / 'counts'},day=9")
