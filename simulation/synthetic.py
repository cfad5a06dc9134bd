"""Synthetic workloads, for what the recorded ones do not show alone; they are always called
synthetic.

A workload is written as one word, `KIND:name=value,name=value`. All its requests have the same
lengths.
"""

import csv
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.errors import BadInput
from simulation.traces import Row, Workload

MODEL = "synthetic"
HOUR_S = 3600.0
MOST = 500_000
"""The most requests of one workload. More is taken for a typing error."""
MOST_MODELS = 10_000


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of workload. `numbers` are its parameters with their defaults, None for a parameter
    that must be given. `words` are the same for parameters that are no numbers."""

    arrivals: Callable[["Values", random.Random], Iterator[float]]
    """Arrivals in order, in seconds."""
    describe: str
    """A description, with the parameters' names in braces."""
    numbers: Mapping[str, float | None]
    words: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Values:
    numbers: Mapping[str, float]
    words: Mapping[str, str]


def is_synthetic(text: str) -> bool:
    return text.partition(":")[0] in KINDS and ":" in text


def synthesize(text: str, *, seed: int = 0) -> Workload:
    """The workload of a description such as `gamma:rate=4,cv=8,seconds=600,prompt=1024,output=128`.

    BadInput says which parameter is missing, unknown or impossible.
    """
    name, _, given = text.partition(":")
    kind = KINDS.get(name)
    if kind is None:
        raise BadInput(f"--trace {text}: no such kind of workload; there are {', '.join(KINDS)}")
    values = _values(text, kind, given)
    prompt, output = int(values.numbers["prompt"]), int(values.numbers["output"])
    named = _models(text, values, random.Random(f"models of {seed}"))
    rows: list[Row] = []
    for at in kind.arrivals(values, random.Random(seed)):
        if len(rows) == MOST:
            raise BadInput(f"--trace {text}: more than {MOST} requests")
        rows.append(Row(at, prompt, output, next(named)))
    if not rows:
        raise BadInput(f"--trace {text}: no request falls into its time; make it longer")
    described = kind.describe.format(
        **{key: f"{value:g}" for key, value in values.numbers.items()}, **values.words
    )
    note = f"synthetic: {described}; every prompt {prompt} and every output {output} tokens"
    if values.numbers["models"] > 1:
        note += "; {models:g} models, Zipf {skew:g}".format_map(values.numbers)
    return Workload(text, tuple(rows), (note,), synthetic=True)


def _models(text: str, values: Values, rng: random.Random) -> Iterator[str]:
    """The model of request after request. The n-th most popular model is asked for with a frequency
    of 1 / n^skew."""
    count = int(values.numbers["models"])
    if count > MOST_MODELS:
        raise BadInput(f"--trace {text}: more than {MOST_MODELS} models")
    if count == 1:
        return itertools.repeat(MODEL)
    names = [f"{MODEL}-{index:0{len(str(count - 1))}}" for index in range(count)]
    weights = list(
        itertools.accumulate((rank + 1) ** -values.numbers["skew"] for rank in range(count))
    )
    return (rng.choices(names, cum_weights=weights)[0] for _ in itertools.count())


def _values(text: str, kind: Kind, given: str) -> Values:
    numbers, words = dict(kind.numbers), dict(kind.words)
    for pair in given.split(",") if given else ():
        key, equals, value = pair.partition("=")
        if not equals or (key not in numbers and key not in words):
            known = ", ".join([*numbers, *words])
            raise BadInput(f"--trace {text}: {pair!r} is none of its parameters: {known}")
        if key in words:
            words[key] = value
        else:
            numbers[key] = _number(text, key, value)
    missing = [key for key, value in [*numbers.items(), *words.items()] if value is None]
    if missing:
        raise BadInput(
            f"--trace {text}: {', '.join(missing)} must be given, as in {missing[0]}=..."
        )
    return Values(
        {key: value for key, value in numbers.items() if value is not None},
        {key: value for key, value in words.items() if value is not None},
    )


def _number(text: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise BadInput(f"--trace {text}: {key}={value} is not a number") from None
    least = (
        0
        if key in ("idle", "day", "skew")
        else 1
        if key in ("prompt", "output", "models")
        else 1e-6
    )
    if not least <= number < 1e9:
        raise BadInput(f"--trace {text}: {key}={value} must be at least {least:g}")
    return number


# --- arrivals ---------------------------------------------------------------


def _gamma(values: Values, rng: random.Random) -> Iterator[float]:
    """Gaps of a Gamma distribution with mean 1/rate. cv 1 is Poisson; a larger cv makes bursts."""
    numbers = values.numbers
    shape = numbers["cv"] ** -2
    mean = 1 / numbers["rate"]
    at = rng.gammavariate(shape, mean / shape)
    while at < numbers["seconds"]:
        yield at
        at += rng.gammavariate(shape, mean / shape)


def _poisson(values: Values, rng: random.Random) -> Iterator[float]:
    at = rng.expovariate(values.numbers["rate"])
    while at < values.numbers["seconds"]:
        yield at
        at += rng.expovariate(values.numbers["rate"])


def _spike(values: Values, rng: random.Random) -> Iterator[float]:
    return (values.numbers["idle"] + at for at in _poisson(values, rng))


def _hourly(values: Values, rng: random.Random) -> Iterator[float]:
    """Each hour has as many arrivals as were counted, at random times."""
    counts = _counts(Path(values.words["file"]), int(values.numbers["day"]), values.words["column"])
    hour_s = HOUR_S / values.numbers["compress"]
    for hour, count in sorted(counts.items()):
        yield from sorted((hour + rng.random()) * hour_s for _ in range(count))


def _counts(path: Path, day: int, column: str) -> dict[int, int]:
    """Requests by hour of that day. The file has the columns day, hour and some columns of
    counts."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.DictReader(file)
            columns = lines.fieldnames or ()
            if not {"day", "hour", column} <= set(columns):
                raise BadInput(f"{path}, line 1: expected day,hour and {column}, got {columns}")
            counts = {int(row["hour"]): int(row[column]) for row in lines if int(row["day"]) == day}
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    except (TypeError, ValueError) as error:
        raise BadInput(f"{path}: expected whole numbers, by day and hour ({error})") from None
    if not counts:
        raise BadInput(f"{path} has no day {day}")
    return counts


_COMMON: dict[str, float | None] = {"prompt": 1024, "output": 128, "models": 1, "skew": 0}
KINDS: Mapping[str, Kind] = {
    "gamma": Kind(
        _gamma,
        "Gamma bursts, {rate} requests a second on average, CV {cv}, for {seconds} s",
        {"rate": None, "cv": None, "seconds": None} | _COMMON,
        {},
    ),
    "poisson": Kind(
        _poisson,
        "Poisson arrivals, {rate} a second for {seconds} s",
        {"rate": None, "seconds": None} | _COMMON,
        {},
    ),
    "spike": Kind(
        _spike,
        "a spike, idle for {idle} s, then {rate} requests a second (Poisson) for {seconds} s",
        {"rate": None, "seconds": None, "idle": 5} | _COMMON,
        {},
    ),
    "hourly": Kind(
        _hourly,
        "{column} counts by hour of day {day} in {file}, spread at random over each hour, "
        "time compressed {compress} times",
        {"day": None, "compress": 1} | _COMMON,
        {"file": None, "column": "all"},
    ),
}
