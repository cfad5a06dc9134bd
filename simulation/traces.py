"""Recorded workloads: when requests came and how long they were, from their publishers' files.

Four formats are recognised by the content of the file:

- Azure LLM inference (Splitwise, ISCA 2024), CSV: TIMESTAMP,ContextTokens,GeneratedTokens
- BurstGPT (KDD 2025), CSV: Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
- Mooncake (FAST 2025), JSON lines: {"timestamp": ms, "input_length": n, "output_length": n, ...}
- plain CSV: arrival_s,prompt_tokens,output_tokens,model

Nothing is dropped or changed without a note that says how much.
"""

import csv
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple, TextIO

from shared.errors import BadInput

PLAIN = ("arrival_s", "prompt_tokens", "output_tokens", "model")
AZURE = ("timestamp", "contexttokens", "generatedtokens")
BURSTGPT = ("timestamp", "model", "request tokens", "response tokens", "total tokens", "log type")
HOURLY = ("day", "hour")
MOONCAKE = ("timestamp", "input_length", "output_length")
FORMATS = (
    "`arrival_s,prompt_tokens,output_tokens,model`, Azure's "
    "`TIMESTAMP,ContextTokens,GeneratedTokens`, BurstGPT's `Timestamp,Model,Request tokens,"
    "Response tokens,Total tokens,Log Type` or Mooncake's JSON lines"
)
UNIT_S = 0.01
"""Mooncake's ticks are off by a millisecond in places."""
TICK_S = (1.0, 60.0)
"""If all arrival times are multiples of a number in this range (seconds), they may have been
rounded."""
TICKS = 20
"""If there are fewer different arrival times than this, they are not taken for ticks."""


class Row(NamedTuple):
    """A request. The arrival is in seconds from the start of the workload."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    model: str


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    rows: tuple[Row, ...]
    """At least one, in order of arrival."""
    notes: tuple[str, ...] = ()
    """What was done to the workload, in words, in order."""
    synthetic: bool = False

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted({row.model for row in self.rows}))


def read_trace(path: Path, *, seed: int = 0) -> Workload:
    """The requests of a file, on its own clock; the clock of Azure's files starts at their first
    request.

    BadInput names the file and line that cannot be read, and says what was expected there.
    """
    with _opened(path) as file:
        rows = list(_rows(path, file))
    if not rows:
        raise BadInput(f"{path} has no requests")
    notes: list[str] = []
    if any(later.arrival_s < row.arrival_s for row, later in pairwise(rows)):
        rows.sort(key=lambda row: row.arrival_s)
        notes.append("rows were not in order of time: sorted")
    rows = _usable(_spread(rows, random.Random(seed), notes), notes)
    if not rows:
        raise BadInput(f"{path} has no request with a prompt and an output")
    return Workload(path.name, tuple(rows), tuple(notes))


def window(workload: Workload, from_s: float, until_s: float) -> Workload:
    """The requests of [from_s, until_s). The clock then starts at `from_s`."""
    kept = tuple(
        row._replace(arrival_s=row.arrival_s - from_s)
        for row in workload.rows
        if from_s <= row.arrival_s < until_s
    )
    end = "the end" if math.isinf(until_s) else f"{until_s:g} s"
    if not kept:
        first, last = workload.rows[0].arrival_s, workload.rows[-1].arrival_s
        raise BadInput(
            f"{workload.name} has no requests from {from_s:g} s to {end}; "
            f"they come from {first:.0f} s to {last:.0f} s"
        )
    if len(kept) == len(workload.rows) and not from_s:
        return workload
    note = f"only {from_s:g} s to {end}: {len(kept)} of {len(workload.rows)} requests"
    return replace(workload, rows=kept, notes=(*workload.notes, note))


def served_by(workload: Workload, names: Mapping[str, str]) -> Workload:
    """The workload with the names of the models that serve in place of the trace's names."""
    rows = tuple(row._replace(model=names[row.model]) for row in workload.rows)
    return replace(workload, rows=rows)


def clip(workload: Workload, context: Mapping[str, int]) -> Workload:
    """Cuts requests to what their model can take: `context` tokens, prompt and output together.

    Outputs are cut to half the context, then prompts to what is left. Requests are cut rather than
    refused, because the trace came from models with longer contexts and its arrivals are what is
    replayed.
    """
    rows: list[Row] = []
    clipped = 0
    for row in workload.rows:
        most = context[row.model]
        if row.prompt_tokens + row.output_tokens > most:
            output = min(row.output_tokens, most // 2)
            row = row._replace(
                prompt_tokens=min(row.prompt_tokens, most - output), output_tokens=output
            )
            clipped += 1
        rows.append(row)
    if not clipped:
        return workload
    lengths = "/".join(str(most) for most in sorted(set(context.values())))
    note = f"{_share(clipped, len(rows))} clipped to the context of {lengths} tokens"
    return replace(workload, rows=tuple(rows), notes=(*workload.notes, note))


# --- reading ----------------------------------------------------------------


def _opened(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None


def _rows(path: Path, file: TextIO) -> Iterator[Row]:
    try:
        first = file.readline()
        file.seek(0)
        if first.lstrip().startswith("{"):
            yield from _mooncake(path, file)
        else:
            yield from _csv(path, file)
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not text; a trace is {FORMATS}") from None


def _csv(path: Path, file: TextIO) -> Iterator[Row]:
    lines = csv.reader(file)
    header = tuple(field.strip().lower() for field in next(lines, ()))
    if header[:2] == HOURLY:
        raise BadInput(
            f"{path} has counts by hour, not requests: "
            f"--trace hourly:file={path},day=N makes a synthetic workload from them"
        )
    parse = _PARSERS.get(header)
    if parse is None:
        raise BadInput(f"{path}, line 1: no known header; a trace is {FORMATS}")
    start: float | None = None
    for fields in lines:
        if not fields:
            continue
        try:
            if len(fields) != len(header):
                raise ValueError(f"{len(fields)} fields")
            row = parse(fields)
            _check(row)
        except ValueError as error:
            raise BadInput(
                f"{path}, line {lines.line_num}: expected {','.join(header)}, "
                f"got {','.join(fields)[:80]!r} ({error})"
            ) from None
        if parse is _azure:
            start = row.arrival_s if start is None else start
            row = row._replace(arrival_s=row.arrival_s - start)
        yield row


def _plain(fields: list[str]) -> Row:
    return Row(float(fields[0]), int(fields[1]), int(fields[2]), fields[3])


_EPOCH = datetime(2020, 1, 1)
"""Near enough that floats keep the microseconds."""


def _azure(fields: list[str]) -> Row:
    at = datetime.fromisoformat(fields[0]).replace(tzinfo=None)
    return Row((at - _EPOCH).total_seconds(), int(fields[1]), int(fields[2]), "azure")


def _burstgpt(fields: list[str]) -> Row:
    return Row(float(fields[0]), int(fields[2]), int(fields[3]), fields[1])


_PARSERS: Mapping[tuple[str, ...], Callable[[list[str]], Row]] = {
    PLAIN: _plain,
    AZURE: _azure,
    BURSTGPT: _burstgpt,
}


def _mooncake(path: Path, file: TextIO) -> Iterator[Row]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            at, prompt, output = (entry[field] for field in MOONCAKE)
            row = Row(float(at) / 1000, int(prompt), int(output), "mooncake")
            _check(row)
        except (ValueError, TypeError, KeyError) as error:
            raise BadInput(
                f'{path}, line {number}: expected {{"timestamp": ms, "input_length": tokens, '
                f'"output_length": tokens}}, got {line.strip()[:80]!r} ({error!r})'
            ) from None
        yield row


def _check(row: Row) -> None:
    if not math.isfinite(row.arrival_s):
        raise ValueError("the time is not a number")
    if row.prompt_tokens < 0 or row.output_tokens < 0:
        raise ValueError("less than 0 tokens")


# --- what is done to what was read ------------------------------------------


def _spread(rows: list[Row], rng: random.Random, notes: list[str]) -> list[Row]:
    """Spreads arrivals that were rounded down to ticks evenly at random over their ticks.

    They count as rounded if nearly all share a tick with others. Left alone, they would all come as
    bursts that never were.
    """
    arrivals = [round(row.arrival_s / UNIT_S) for row in rows]
    tick = math.gcd(*arrivals)
    tick_s = tick * UNIT_S
    distinct = len(set(arrivals))
    if not TICK_S[0] <= tick_s <= TICK_S[1] or distinct < TICKS or len(rows) < 2 * distinct:
        return rows
    notes.append(f"arrivals sit on ticks of {tick_s:g} s: spread at random inside their ticks")
    spread: list[Row] = []
    for at, together in groupby(zip(arrivals, rows, strict=True), key=lambda pair: pair[0]):
        group = [row for _, row in together]
        offsets = sorted(rng.random() * tick_s for _ in group)
        spread.extend(
            row._replace(arrival_s=at * UNIT_S + offset)
            for row, offset in zip(group, offsets, strict=True)
        )
    return spread


def _usable(rows: list[Row], notes: list[str]) -> list[Row]:
    """The requests without those that got no tokens (BurstGPT's failures) or had no prompt."""
    kinds = Counter(
        "without output (failures)" if not row.output_tokens else "without a prompt"
        for row in rows
        if not row.output_tokens or not row.prompt_tokens
    )
    for kind, count in kinds.items():
        notes.append(f"{_share(count, len(rows))} {kind} dropped")
    return [row for row in rows if row.output_tokens and row.prompt_tokens]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} requests ({100 * part / whole:.1f} %)"
