"""The fuzzer of `benchmarks.fuzz` finds nothing in a few inputs. The run by hand has more."""

import pytest

from benchmarks.fuzz import parsers
from benchmarks.fuzz.__main__ import SHARES, run_in_cluster
from benchmarks.fuzz.report import Report
from benchmarks.fuzz.values import Source
from tests.support.amounts import amount

INPUTS = amount(3_000, thorough=6_000)


def test_parsers() -> None:
    report = Report()
    parsers.run(1, INPUTS, report)
    assert not report.found, "\n".join(report.lines())
    assert sum(report.tried.values()) >= INPUTS * 0.9
    # Inputs that nobody can read, and inputs that are read: both are there for every parser.
    for parser in parsers.PARSERS:
        assert report.answers[parser.name]["read"] > 0, parser.name


def test_what_is_drawn_follows_from_the_seed() -> None:
    for parser in parsers.PARSERS:
        first, second, other = (Source(seed) for seed in (1, 1, 2))
        drawn = [parser.draw(first) for _ in range(20)]
        assert drawn == [parser.draw(second) for _ in range(20)]
        assert drawn != [parser.draw(other) for _ in range(20)]


@pytest.mark.parametrize("part", [part for part in SHARES if part != "parsers"])
async def test_real_processes(part: str) -> None:
    report = Report()
    await run_in_cluster(round(300 / SHARES[part]), 1, [part], report)
    assert not report.found, "\n".join(report.lines())
    assert sum(report.tried.values()) >= 200


def test_a_parser_that_raises_something_else_is_found() -> None:
    def read(data: bytes) -> object:
        raise KeyError(data)

    report = Report()
    broken = parsers.Parser("broken", lambda source: b"x", read, (ValueError,))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parsers, "PARSERS", (broken,))
        parsers.run(1, 40, report)
    assert any(what.startswith("broken: KeyError") for what in report.found)
    assert report.lines()[-1].endswith("1 kinds of findings")
