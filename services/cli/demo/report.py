"""The demo's report: what was promised, what happened, and whether every token was right."""

from collections.abc import Mapping, Sequence
from typing import Any

from services.cli import ledger_text
from services.cli.demo.burst import Ask, Outcome
from services.local.watch import Watch
from shared.messages.scaling import EventRecord

BUCKET_S = 0.5
MOST = 4
"""How many phases of the event's ledger the text names."""


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90 and p99 (nearest rank), in milliseconds."""
    ordered = sorted(values)

    def rank(percent: int) -> float | None:
        if not ordered:
            return None
        return round(ordered[max(0, -(-len(ordered) * percent // 100) - 1)] * 1e3, 2)

    return {f"p{percent}": rank(percent) for percent in (50, 90, 99)}


def throughput(outcomes: Sequence[Outcome], start: float) -> list[tuple[float, float]]:
    """(the middle of a bucket, in seconds after `start`; tokens per second in it), for each bucket
    of BUCKET_S. `start`: when the burst began, on the clock of `Outcome.token_at`."""
    times = [at - start for outcome in outcomes for at in outcome.token_at]
    if not times:
        return []
    counts = [0] * (int(max(times) / BUCKET_S) + 1)
    for at in times:
        counts[int(at / BUCKET_S)] += 1
    return [(round((i + 0.5) * BUCKET_S, 3), count / BUCKET_S) for i, count in enumerate(counts)]


def requests_part(
    outcomes: Sequence[Outcome], expected: Mapping[Ask, tuple[int, ...]]
) -> dict[str, int]:
    accepted = [outcome for outcome in outcomes if not outcome.refused]
    completed = [outcome for outcome in accepted if outcome.done]
    wrong = [o for o in completed if tuple(o.tokens) != expected[o.ask]]
    return {
        "accepted": len(accepted),
        "completed": len(completed),
        "lost": len(accepted) - len(completed),
        "wrong": len(wrong),
        "refused": len(outcomes) - len(accepted),
    }


def event_part(record: EventRecord | None) -> dict[str, Any]:
    """What the report says of the scaling event; all times in seconds, and sizes in bytes. `burst`
    stands for the moment from which the first request had to wait for an instance."""
    names = ("id", "t_all_s", "physical_limit_s", "predicted_t_all_s", "first_partial_token_s",
             "decision_to_first_byte_s", "burst_to_decision_s", "burst_to_first_byte_s",
             "bytes_moved")  # fmt: skip
    if record is None:
        return dict.fromkeys(names)
    first_byte_s = record.actual.first_byte_s
    waited_ns = record.waiting_ns or record.detected_ns
    burst_to_decision_s = (record.decided_ns - waited_ns) / 1e9
    burst_to_first_byte_s = None if first_byte_s is None else burst_to_decision_s + first_byte_s
    values = (
        record.id,
        record.actual.all_complete_s,
        record.physical_limit_s,
        record.predicted.all_complete_s,
        record.actual.first_partial_token_s,
        first_byte_s,
        burst_to_decision_s,
        burst_to_first_byte_s,
        record.bytes_moved,
    )
    return dict(zip(names, values, strict=True)) | {
        "state": record.state.value,
        "cause": record.cause,
        "sources": list(record.sources),
        "targets": list(record.targets),
        "revision": record.revision,
        "first_path_s": record.actual.first_path_s,
        "predicted_first_path_s": record.predicted.first_path_s,
        "first_complete_s": record.actual.first_complete_s,
        "ledger": ledger_text.as_json(record.ledger),
    }


def make_report(
    watch: Watch,
    outcomes: Sequence[Outcome],
    expected: Mapping[Ask, tuple[int, ...]],
    start: float,
    *,
    figure: str,
    page: str | None = None,
) -> dict[str, Any]:
    """The document of `demo --json`. `page`: the file with the event's page; None: there was no
    event."""
    record = watch.scale_out()
    return {
        "requests": requests_part(outcomes, expected),
        "event": event_part(record),
        "ttft_ms": percentiles([o.ttft_s for o in outcomes if o.ttft_s is not None]),
        "tpot_ms": percentiles([o.tpot_s for o in outcomes if o.tpot_s is not None]),
        "tokens_per_s": throughput(outcomes, start),
        "scale_in": {
            "instances_before": max((sample.replicas for sample in watch.samples), default=0),
            "instances_after": len(watch.instances),
        },
        "errors": sorted({outcome.error for outcome in outcomes if outcome.error}),
        "figure": figure,
        "page": page,
    }


def good(report: Mapping[str, Any]) -> bool:
    """Whether nothing was lost or wrong, something was served, and one instance is left."""
    requests = report["requests"]
    return (
        bool(requests["completed"])
        and not requests["lost"]
        and not requests["wrong"]
        and report["scale_in"]["instances_after"] == 1
    )


def headline(report: Mapping[str, Any]) -> str:
    requests, event = report["requests"], report["event"]
    burst = (
        f"{requests['completed']} of {requests['accepted']} requests served, "
        f"{requests['lost']} lost, {requests['wrong']} wrong"
    )
    if event["t_all_s"] is None:
        return burst
    copies = f"{len(event['targets'])} copies of the model in {event['t_all_s']:.2f} s"
    return f"{burst}; {copies}, serving while they arrive"


def as_text(report: Mapping[str, Any]) -> str:
    scale_in = report["scale_in"]
    requests = report["requests"]
    lines = [
        f"requests   {requests['completed']} of {requests['accepted']} completed, "
        f"{requests['lost']} lost, {requests['wrong']} with wrong tokens"
    ]
    if requests["refused"]:
        lines.append(f"           {requests['refused']} more refused")
    lines += _event_lines(report["event"])
    lines += _ledger_lines(report["event"])
    for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")):
        p = report[key]
        if p["p50"] is not None:
            lines.append(
                f"{name:<10} p50 {p['p50']:.0f} ms, p90 {p['p90']:.0f} ms, p99 {p['p99']:.0f} ms"
            )
    rates = [rate for _, rate in report["tokens_per_s"]]
    lines.append(f"tokens/s   peak {max(rates, default=0):.0f}")
    lines.append(
        f"scale-in   {scale_in['instances_before']} -> {scale_in['instances_after']} instances"
    )
    lines += [f"error      {error}" for error in report["errors"]]
    lines.append(f"figure     {report['figure']}")
    if report["page"]:
        lines.append(f"page       {report['page']}")
    return "\n".join(lines)


def _event_lines(event: Mapping[str, Any]) -> list[str]:
    if event["id"] is None:
        return ["scaling    none: one instance was enough"]
    lines = [
        f"scaling    {event['id']} ({event['state']}): {', '.join(event['sources'])} -> "
        f"{', '.join(event['targets'])}, {event['bytes_moved'] / 1e6:.1f} MB moved",
        f"           why: {event['cause']}",
    ]
    t_all, limit = event["t_all_s"], event["physical_limit_s"]
    predicted, partial = event["predicted_t_all_s"], event["first_partial_token_s"]
    if t_all is not None:
        beside = []
        if predicted is not None:
            beside.append(f"predicted {predicted:.2f} s")
        if limit is not None:
            beside.append(f"physical limit {limit:.2f} s: {t_all / limit:.3f} x")
        lines.append(f"           all complete after {t_all:.2f} s ({', '.join(beside)})")
    if event["decision_to_first_byte_s"] is not None:
        first = event["decision_to_first_byte_s"] * 1e3
        decided = event["burst_to_decision_s"] * 1e3
        lines.append(
            f"           decided {decided:.0f} ms after a request had to wait, first byte after "
            f"{first:.1f} ms more"
        )
    if partial is not None:
        share = f" ({partial / t_all:.2f} of the whole)" if t_all else ""
        lines.append(
            f"           first token over a partly loaded node after {partial:.2f} s{share}"
        )
    return lines


def _ledger_lines(event: Mapping[str, Any]) -> list[str]:
    """The phases that took most of the event."""
    spent = event.get("ledger") or []
    whole = sum(each["seconds"] for each in spent)
    most = sorted(spent, key=lambda each: -each["seconds"])[:MOST]
    parts = [
        f"{each['phase']} {each['seconds'] * 1e3:.0f} ms ({each['seconds'] / whole:.0%})"
        for each in most
        if each["seconds"]
    ]
    if not parts:
        return []
    return [f"           {whole:.2f} s since the first request waited: {', '.join(parts)}"]
