"""Makes the moving picture of a scaling event in the README from a report of it:

lambdascale demo && python -m tests.support.event_animation demo-out/event.html docs/event.svg

Every block flies from the node that sent it, at the times of the record, in real time. Where
pictures do not move, it shows the end.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import msgspec

from shared.ids import NodeId
from shared.messages.chronicle import Arrival, Served
from shared.messages.scaling import EventRecord

LEAD_S, HOLD_S = 0.8, 2.6
"""How long the beginning and the end stand still."""
LEFT, TOP, ROW, CELL, STATE = 78, 64, 46, 38, 158
WAITS, PATH, ALONE = "#f1f1ef", "#fde3c1", "#d3ecd0"
INK, FAINT = "#222222", "#7a7a76"


@dataclass(frozen=True, slots=True)
class Event:
    record: EventRecord
    arrivals: Sequence[Arrival]
    served: Sequence[Served]

    def at(self, ns: int) -> float:
        """Seconds after the decision."""
        return (ns - self.record.decided_ns) / 1e9

    @property
    def nodes(self) -> list[NodeId]:
        """Sources first."""
        targets = sorted({arrival.node for arrival in self.arrivals})
        return [*self.record.sources, *targets]

    @property
    def end_s(self) -> float:
        return max(self.at(arrival.ready_ns) for arrival in self.arrivals)

    @property
    def length_s(self) -> float:
        return LEAD_S + self.end_s + HOLD_S

    def share(self, seconds: float) -> float:
        """Of the picture's whole time, when so many seconds after the decision are over."""
        return round((LEAD_S + max(seconds, -LEAD_S)) / self.length_s, 4)


def read(report: Path) -> Event:
    """The (first) event of a page that `lambdascale report` or the demo has written."""
    found = re.search(r'id="data">(.*?)</script>', report.read_text(), re.DOTALL)
    if found is None:
        raise SystemExit(f"{report} is no report: it has no data")
    data = msgspec.json.decode(found[1])
    name, record = next(iter(data["put"]["events"].items()))
    return Event(
        msgspec.convert(record, EventRecord),
        msgspec.convert(data["add"]["arrivals"][name], list[Arrival]),
        msgspec.convert(data["put"]["trails"][name]["served"], list[Served]),
    )


def draw(event: Event) -> str:
    nodes = event.nodes
    width = LEFT + event.record.n_blocks * CELL + STATE
    height = TOP + len(nodes) * ROW + 58
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f"<title>{escape(title(event))}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="15" font-weight="bold" fill="{INK}">'
        f"{escape(title(event))}</text>",
        f'<text x="16" y="46" fill="{FAINT}">Each square is one of the model\'s '
        f"{event.record.n_blocks} blocks, at the time at which it moved.</text>",
    ]
    for row, node in enumerate(nodes):
        parts.extend(_row(event, node, row))
    for arrival in sorted(event.arrivals, key=lambda a: a.finished_ns):
        parts.append(_block(event, arrival, nodes))
    parts.extend(_clock(event, width, TOP + len(nodes) * ROW + 20))
    return "\n".join([*parts, "</svg>\n"])


def title(event: Event) -> str:
    first = event.record.actual.first_partial_token_s
    served = "" if first is None else f"; nodes that still load answer after {first:.1f} s"
    sources, targets = len(event.record.sources), len(event.nodes) - len(event.record.sources)
    return f"{sources} node scales to {sources + targets} in {event.end_s:.1f} s{served}"


def _row(event: Event, node: NodeId, row: int) -> Iterator[str]:
    """The node's name, and what it does, from when on, each on a colour of its own."""
    y, right = TOP + row * ROW, LEFT + event.record.n_blocks * CELL
    yield f'<text x="16" y="{y + 27}" fill="{INK}">{escape(node)}</text>'
    if node in event.record.sources:
        states = [(-LEAD_S, ALONE, "has all: serves")]
    else:
        began = [event.at(s.first_token_ns or s.began_ns) for s in event.served if _leads(s, node)]
        ready = max(event.at(a.ready_ns) for a in event.arrivals if a.node == node)
        states = [(-LEAD_S, WAITS, "loads"), (ready, ALONE, "serves alone")]
        if began and min(began) < ready:
            states.insert(1, (min(began), PATH, "serves while it loads"))
    for number, (since, colour, words) in enumerate(states):
        last = number == len(states) - 1
        until = None if last else states[number + 1][0]
        yield (
            f'<g opacity="{int(last)}">{_shown(event, since, until)}'
            f'<rect x="{LEFT - 4}" y="{y + 3}" width="{right - LEFT + STATE - 6}" '
            f'height="{ROW - 6}" rx="5" fill="{colour}"/>'
            f'<text x="{right + 10}" y="{y + 27}" fill="{INK}">{words}</text></g>'
        )
    if node in event.record.sources:
        for block in range(event.record.n_blocks):
            yield f"<g>{_square(event, block, row)}</g>"


def _leads(served: Served, node: NodeId) -> bool:
    """Whether it is a path of several nodes, one of which is this one."""
    return len(served.stages) > 1 and any(stage[0] == node for stage in served.stages)


def _block(event: Event, arrival: Arrival, nodes: Sequence[NodeId]) -> str:
    row, source = nodes.index(arrival.node), nodes.index(arrival.source)
    began, ended = (
        event.share(event.at(ns)) for ns in (arrival.first_byte_ns, arrival.finished_ns)
    )
    far = (source - row) * ROW
    return (
        f"<g>{_square(event, arrival.block, row)}"
        f'<animate attributeName="opacity" values="0;.6;1" keyTimes="0;{began};{ended}" '
        f'calcMode="discrete" {_turns(event)}/>'
        f'<animateTransform attributeName="transform" type="translate" '
        f'values="0 {far};0 {far};0 0;0 0" keyTimes="0;{began};{ended};1" {_turns(event)}/></g>'
    )


def _square(event: Event, block: int, row: int) -> str:
    x, y = LEFT + block * CELL + 2, TOP + row * ROW + 8
    shade = round(255 * block / max(1, event.record.n_blocks - 1))
    return (
        f'<rect x="{x}" y="{y}" width="{CELL - 5}" height="{ROW - 16}" rx="3" '
        f'fill="rgb({40 + shade // 3},{90 + shade // 3},{160 - shade // 3})"/>'
        f'<text x="{x + (CELL - 5) / 2}" y="{y + 19}" text-anchor="middle" fill="#ffffff" '
        f'font-size="11">{block}</text>'
    )


def _clock(event: Event, width: int, y: int) -> Iterator[str]:
    """A line of seconds along which the time runs."""
    length = width - LEFT - 24
    scale = length / max(1.0, event.end_s)
    yield f'<line x1="{LEFT}" x2="{LEFT + length}" y1="{y}" y2="{y}" stroke="{FAINT}"/>'
    for second in range(int(event.end_s) + 1):
        x = round(LEFT + second * scale, 1)
        yield f'<line x1="{x}" x2="{x}" y1="{y}" y2="{y + 5}" stroke="{FAINT}"/>'
        yield f'<text x="{x}" y="{y + 20}" text-anchor="middle" fill="{FAINT}">{second} s</text>'
    yield (
        f'<circle cx="{LEFT + length}" cy="{y}" r="6" fill="#c0392b">'
        f'<animate attributeName="cx" values="{LEFT};{LEFT};{LEFT + length};{LEFT + length}" '
        f'keyTimes="0;{event.share(0)};{event.share(event.end_s)};1" {_turns(event)}/></circle>'
    )


def _shown(event: Event, since: float, until: float | None) -> str:
    steps = [(0.0, 0), (event.share(since), 1)] if since > -LEAD_S else [(0.0, 1)]
    if until is not None:
        steps.append((event.share(until), 0))
    values = ";".join(str(value) for _, value in steps)
    times = ";".join(str(time) for time, _ in steps)
    return (
        f'<animate attributeName="opacity" values="{values}" keyTimes="{times}" '
        f'calcMode="discrete" {_turns(event)}/>'
    )


def _turns(event: Event) -> str:
    return f'dur="{event.length_s:.2f}s" repeatCount="indefinite"'


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(read(Path(sys.argv[1]))))
