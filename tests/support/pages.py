"""What `/metrics` shows."""

from shared.metrics import Metrics


def page(metrics: Metrics) -> dict[str, float]:
    """Every sample, by its name and labels as Prometheus' text form writes them."""
    body, _ = metrics.render()
    lines = (line for line in body.decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
