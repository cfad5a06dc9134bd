"""The figure of an event, and the live view: drawn from a recorded watch."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot as plt
from rich.console import Console

from services.cli.demo.burst import Ask, Outcome
from services.cli.demo.figure import draw, lanes
from services.cli.demo.view import render
from services.local.watch import Watch
from shared.ids import NodeId
from tests.unit.cli.records import BLOCKS, DECIDED_NS, SOURCE, STORY, TARGET, watched

NODES = [SOURCE, TARGET, NodeId("node-2")]


def outcomes(start: float) -> list[Outcome]:
    ask = Ask("p", 3, 0.0, 0)
    return [Outcome(ask, start, token_at=[start + 0.3, start + 1.0], tokens=[1, 2], done=True)]


async def test_a_figure_is_drawn(tmp_path: Path) -> None:
    watch = await watched()
    start = watch.monotonic(DECIDED_NS) - 0.5
    draw(tmp_path / "event.png", watch, NODES, outcomes(start), start, "A title")
    image = plt.imread(tmp_path / "event.png")
    assert image.shape[0] > 800
    assert image.shape[1] > 1000
    assert len({tuple(pixel) for pixel in image[::7, ::7].reshape(-1, image.shape[2])}) > 10
    assert plt.get_fignums() == []


def test_a_figure_of_nothing_is_drawn_too(tmp_path: Path) -> None:
    draw(tmp_path / "event.png", Watch(), NODES, [], 0.0, "Nothing happened")
    assert (tmp_path / "event.png").exists()


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=30))
def test_bars_of_one_lane_never_overlap_and_no_lane_is_wasted(spans: list[tuple[int, int]]) -> None:
    spans = [(begin, begin + length) for begin, length in spans]
    placed = lanes(spans)
    for lane in set(placed):
        own = sorted(span for span, at in zip(spans, placed, strict=True) if at == lane)
        assert all(a[1] <= b[0] for a, b in pairwise(own))
    most = max((sum(b <= at < e for b, e in spans) for at, _ in spans), default=0)
    assert len(set(placed)) == most


def shown(watch: Watch, done: list[Outcome], phase: str, start: float | None) -> str:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(render(watch, NODES, done, phase, start))
    return capture.get()


async def test_the_view_shows_each_moment_on_as_many_lines() -> None:
    watch = Watch(n_blocks=BLOCKS)
    views = [shown(watch, [], "before", None)]
    for message in STORY:
        await watch.hear(message)
        views.append(shown(watch, outcomes(0.0), "burst", 0.0))
    assert len({view.count("\n") for view in views}) == 1
    loading = views[5]
    assert "██░░" in loading
    assert "serves in paths, loading" in loading
    assert "1 x replica, 1 x path over loading nodes" in loading
    assert "9 waiting, 4 running" in loading
    assert "1 x path that ends" in views[8]
    assert "2.00 s taken" in views[-1]


@pytest.mark.parametrize("width", [40, 80])
async def test_the_view_never_wraps(width: int) -> None:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render(await watched(), NODES, outcomes(0.0), "burst", 0.0))
    assert len(capture.get().splitlines()) == len(NODES) + 8
