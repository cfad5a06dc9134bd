"""An event's ledger as a table: what each phase took, beside its prediction."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from services.planner.core.events import LEDGER, PREDICTED
from shared.messages.ledger import Phase, Spent


def lines(ledger: Sequence[Spent]) -> Iterator[str]:
    """Phases that neither took time nor were expected to are left out."""
    whole = sum(spent.seconds for spent in ledger)
    yield f"{'phase':<12}{'predicted':>12}{'actual':>12}{'share':>8}"
    for spent in ledger:
        if spent.seconds or spent.predicted_s:
            yield _line(spent.phase.value, spent.predicted_s, spent.seconds, whole)
    predicted = sum(spent.predicted_s or 0.0 for spent in ledger)
    yield _line("in all", predicted, whole, whole)


def _line(name: str, predicted: float | None, actual: float, whole: float) -> str:
    share = f"{actual / whole:.1%}" if whole else "-"
    return f"{name:<12}{_ms(predicted):>12}{_ms(actual):>12}{share:>8}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def of_attributes(attributes: Mapping[str, Any]) -> tuple[Spent, ...]:
    """The ledger among the attributes of an event's root span (`events.summary`)."""
    return tuple(
        Spent(phase, attributes[name], attributes.get(f"{name}{PREDICTED}"))
        for phase in Phase
        if (name := f"{LEDGER}{phase.value}") in attributes
    )


def as_json(ledger: Iterable[Spent]) -> list[dict[str, Any]]:
    return [
        {"phase": spent.phase.value, "seconds": spent.seconds, "predicted_s": spent.predicted_s}
        for spent in ledger
    ]
