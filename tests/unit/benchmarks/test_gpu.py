"""The benchmark for GPUs: what it says of figures, and that no part costs another's."""

import json
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from benchmarks.gpu import __main__ as bench
from benchmarks.gpu.apart import measured
from benchmarks.gpu.cases import Case, of_device, of_model
from benchmarks.gpu.scale import Sizes, raw_config
from services.node.checkpoints.config import ModelConfig

SHAPE = "llama-3-8b"
KEYS = ["case", "device", "ours", "peer", "unit", "ratio", "limit", "of_limit"]


def ends(shape: str, device: str, runs: int) -> Iterator[tuple[str, float]]:
    yield f"{shape} on {device}", float(runs)


def raises(shape: str, device: str, runs: int) -> Iterator[tuple[str, float]]:
    yield "one", 1.0
    raise RuntimeError("CUDA error: an illegal memory access")


def dies(shape: str, device: str, runs: int) -> Iterator[tuple[str, float]]:
    yield "one", 1.0
    os._exit(7)


def hangs(shape: str, device: str, runs: int) -> Iterator[tuple[str, float]]:
    threading.Event().wait()
    yield "none", 0.0


def test_what_came_before_a_failure_counts() -> None:
    assert list(measured(ends, "a", "b", 3, 100)) == [("a on b", 3.0)]
    failed = ("one", 1.0), "RuntimeError: CUDA error: an illegal memory access"
    assert tuple(measured(raises, "a", "b", 3, 100)) == failed
    assert tuple(measured(dies, "a", "b", 3, 100)) == (("one", 1.0), "its process ended with 7")
    assert list(measured(hangs, "a", "b", 3, 0.1)) == ["not at its end after 0 s"]


def test_sizes_are_those_of_the_published_model() -> None:
    sizes = Sizes(ModelConfig.from_hf(raw_config(SHAPE)))
    assert sizes.read == 2 * (8_030_261_248 - 128256 * 4096)
    assert sizes.multiplied == 8_030_261_248 - 2 * 128256 * 4096
    assert sizes.position == 131_072


def found(ours: dict[str, float], peer: dict[str, float], **limits: float) -> dict[str, Case]:
    cases = of_model(SHAPE, limits, ours, peer)
    return {case.name.removesuffix(f", {SHAPE}"): case for case in cases}


def test_a_decode_step_reads_the_weights_and_all_kv() -> None:
    seconds = {"decode one": 0.004, "decode many": 0.010}
    cases = found(seconds, {"decode many": 0.03}, memory=4e12)
    one, many = cases["decode, batch 1"], cases["decode, batch 64"]
    weights = 2 * (8_030_261_248 - 128256 * 4096)
    assert one.limit == pytest.approx(4e12 / (weights + (2048 + 16) * 131_072))
    assert many.limit == pytest.approx(64 * 4e12 / (weights + 64 * (512 + 16) * 131_072))
    assert (one.ours, one.peer, many.ours) == (250.0, None, 6400.0)
    assert many.ratio == pytest.approx(3.0)
    assert one.share == pytest.approx(250 * (weights + 2064 * 131_072) / 4e12)
    assert not one.missed


@pytest.mark.parametrize(
    ("case", "missed"),
    [
        (Case(name="", unit="tokens/s", ours=2.9, peer=1.0, over_peer=3.0), True),
        (Case(name="", unit="tokens/s", ours=3.1, peer=1.0, over_peer=3.0), False),
        (Case(name="", unit="ms", ours=1.0, peer=2.9, over_peer=3.0), True),
        (Case(name="", unit="GB/s", ours=0.8, limit=1.0, of_limit=0.9), True),
        (Case(name="", unit="GB/s", ours=0.8, of_limit=0.9), False),
    ],
)
def test_a_bar_that_is_missed(case: Case, missed: bool) -> None:
    assert case.missed == missed


def test_times_and_rates_are_compared_the_right_way_round() -> None:
    seconds = {"first token": 0.1, "decode one": 0.004, "decode one, two stages": 0.005}
    cases = found(seconds, {"first token": 0.2}, product=8e14)
    assert cases["TTFT, a prompt of 2048 tokens"].ratio == pytest.approx(2.0)
    assert cases["prefill"].ratio == pytest.approx(2.0)
    assert cases["prefill"].ours == pytest.approx(2 * 2048 * 6_979_588_096 / 0.1 / 1e12)
    assert cases["hand-over between stages, batch 1"].ours == pytest.approx(1.0)
    assert "decode, batch 64" not in cases


def test_a_failed_part_leaves_the_others_rows() -> None:
    assert [case.name for case in of_device({"memory": 1e12})] == ["memory"]
    assert list(of_model(SHAPE, {}, {}, {"decode one": 1.0})) == []
    assert found({"decode one": 0.004}, {})["decode, batch 1"].limit is None


def test_all_of_it_runs(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--shapes", "tiny", "--runs", "1", "--json"])
    bench.main()  # a busy machine may miss bars
    out, err = capfd.readouterr()
    document = json.loads(out)
    assert document["failed"] == {}
    assert all(list(row) == KEYS for row in document["rows"])
    assert len(document["rows"]) >= 10
    assert "ours, tiny: decode many" in err
