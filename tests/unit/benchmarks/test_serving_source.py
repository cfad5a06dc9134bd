"""What a run of the benchmark of a serving source says, and what it is held to."""

import pytest

from benchmarks.serving_source.results import (
    HALF,
    OURS,
    PLAIN,
    WHOLE,
    Results,
    Row,
    Sample,
    Settings,
    Window,
    bar,
    document,
    table,
)

SETTINGS = Settings(link_mbit=400, nbytes=64 << 20, blocks=16, batch=8, window_s=2.5, rounds=3)


def window(tokens_per_s: float, bytes_per_s: float = 0.0) -> Window:
    return Window(
        took_s=2.5,
        tokens_per_s=tokens_per_s,
        bytes_per_s=bytes_per_s,
        node_cores=1.0 + bytes_per_s / 1e9,
        machine_cores=1.25,
    )


def row(link: str, way: str, *rates: float, rate: float = 25e6) -> Row:
    """Alone it gives 100 tokens/s, then 110; loading, these."""
    samples = [Sample(window(100), window(r, rate - 1e6), window(110)) for r in rates]
    return Row(link, way, rate, samples)


def results(*rows: Row) -> Results:
    return Results(SETTINGS, 64 << 20, rows)


def test_a_loss_is_against_the_mean_of_before_and_after() -> None:
    assert Sample(window(100), window(84), window(110)).loss == pytest.approx(0.2)
    assert Sample(window(100), window(126), window(110)).loss == pytest.approx(-0.2)


def test_the_bar_is_of_our_loading_at_half_the_link_and_of_the_median() -> None:
    others = row(HALF, PLAIN, 50), row(WHOLE, OURS, 50), row(WHOLE, PLAIN, 50)
    met = bar(results(*others, row(HALF, OURS, 20, 95, 96)))
    assert met.met
    assert "9.5%, less than 10%" in str(met)
    missed = bar(results(*others, row(HALF, OURS, 94, 94, 105)))
    assert not missed.met
    assert "10.5%, less than 10%" in str(missed)


def test_document() -> None:
    told = document(results(row(HALF, OURS, 84, 105, 94.5)))
    assert told["link_mbit"] == 400
    assert (told["bytes"], told["batch"]) == (64 << 20, 8)
    assert told["rows"] == [
        {
            "link": "half",
            "way": "lambdascale",
            "rate_bytes_per_s": 25_000_000,
            "load_bytes_per_s": 24_000_000,
            "tokens_per_s": 100,
            "loading_tokens_per_s": 94.5,
            "again_tokens_per_s": 110,
            "loss": 0.1,
            "losses": [0.2, 0.0, 0.1],
            "node_cores": [1.0, 1.024],
            "machine_cores": 1.25,
            "rounds": 3,
        }
    ]


def test_table() -> None:
    head, machine, titles, half, plain = table(
        results(row(HALF, OURS, 84, 105, 94.5), row(HALF, PLAIN, 105))
    )
    assert "64.0 MiB, 8 sequences" in head
    assert "medians of 3" in head
    assert "cores" in machine
    assert titles.split()[:4] == ["of", "the", "link", "way"]
    words = half.split()
    assert words[:5] == ["half", "lambdascale", "100.0", "94.5", "110.0"]
    assert words[5:] == [
        "10.0%", "0.0%", "..", "20.0%", "24.0", "0.960", "1.00", "->", "1.02", "1.25",
    ]  # fmt: skip
    assert "plain socket" in plain
    assert "0.0%" in plain
