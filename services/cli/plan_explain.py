"""Explains a plan: what was chosen, what else was considered, and what each would cost."""

import math
from collections.abc import Iterator

from services.cli.plan_text import Plan, title
from services.planner.core.choose import EARLY, RULED_OUT, Considered
from services.planner.core.costs import schedule_arrivals


def report(plan: Plan) -> Iterator[str]:
    yield title(plan)
    yield from plan.ports
    if not plan.schedule.moves:
        yield "every node is a source, or loads by itself: there is nothing to choose"
        return
    yield ""
    yield from _expected(plan)
    yield ""
    yield from _considered(plan)
    yield ""
    yield from _nodes(plan)


def _expected(plan: Plan) -> Iterator[str]:
    outlook, unit = plan.choice.outlook, plan.choice.unit
    over = outlook.all_complete_s
    above = f", {over / plan.limit - 1:.1%} above the physical limit" if over else ""
    yield f"every move carries   {unit} {'block' if unit == 1 else 'blocks'}"
    yield f"first path           {plan.clock(outlook.first_path_s)}"
    yield f"first node complete  {plan.clock(outlook.first_complete_s)}"
    yield f"all complete         {plan.clock(over)}{above} ({plan.clock(plan.limit)})"
    if over is not None and outlook.mean_capacity is not None:
        yield (
            f"capacity meanwhile   {outlook.mean_capacity:.1%} of all nodes complete, on average "
            "(at most, over paths of any holders)"
        )


def _considered(plan: Plan) -> Iterator[str]:
    yield (
        "considered (score: the time until all are complete, less the capacity meanwhile "
        f"x {EARLY:g} of that time; the lowest wins):"
    )
    rows = [("", "algorithm", "blocks a move", "all complete", "capacity", "score", "why not")]
    rows += [_row(plan, each) for each in plan.choice.considered]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    for row in rows:
        cells = [cell.ljust(widths[i]) if i < 2 else cell.rjust(widths[i])
                 for i, cell in enumerate(row[:6])]  # fmt: skip
        yield "  ".join([*cells, row[6]]).rstrip()


def _row(plan: Plan, each: Considered) -> tuple[str, str, str, str, str, str, str]:
    """A candidate's row. For a candidate that was ruled out, only bounds are known."""
    least, most = (">= ", "<= ") if each.verdict == RULED_OUT else ("", "")
    share = each.outlook.mean_capacity
    return (
        " " if each.verdict else "*",
        each.strategy,
        str(each.unit),
        least + plan.clock(each.outlook.all_complete_s),
        "" if share is None else f"{most}{share:.1%}",
        least + (plan.clock(each.score) if each.score < math.inf else "none"),
        each.verdict,
    )


def _nodes(plan: Plan) -> Iterator[str]:
    """When each node is complete if the chosen schedule runs over these links."""
    last: dict[int, float] = {}
    for (node, _), at in schedule_arrivals(plan.schedule, plan.unit_task, {}).items():
        last[node] = max(last.get(node, 0.0), at)
    by_time: dict[str, list[int]] = {}
    for node, at in sorted(last.items(), key=lambda item: item[1]):
        by_time.setdefault(plan.clock(at), []).append(node)
    yield "complete:"
    for clock, nodes in by_time.items():
        shown = ", ".join(map(str, nodes[:16]))
        more = f" and {len(nodes) - 16} more" if len(nodes) > 16 else ""
        yield f"  {clock:>10}  {'node' if len(nodes) == 1 else 'nodes'} {shown}{more}"
