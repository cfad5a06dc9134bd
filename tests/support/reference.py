"""The reference pages that are made of the code: `python -m tests.support.reference` writes them.

`tests/unit/test_reference.py` compares them with what is there.
"""

from collections.abc import Callable
from pathlib import Path

from services.gateway.service import GatewayService
from services.node.metrics import NodeMetrics
from services.planner.metrics import PlannerMetrics
from services.registry.metrics import RegistryMetrics
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.nats import NatsBus
from shared.config import BusConfig, GatewayConfig
from shared.metrics import Family, Metrics
from shared.vitals import Vitals

DOCS = Path(__file__).parents[2] / "docs"
MADE = "<!-- Made by `python -m tests.support.reference`: change the code, then run it. -->"


def every_process() -> list[Family]:
    metrics = Metrics()
    service = GatewayService(MemoryBus(MemoryBroker()), GatewayConfig(), listen=False)
    Vitals(metrics, service, NatsBus(BusConfig(), "reference"))
    return metrics.families


def of_role(add: Callable[[Metrics], object]) -> list[Family]:
    metrics = Metrics()
    add(metrics)
    return metrics.families


def gateways() -> list[Family]:
    bus = MemoryBus(MemoryBroker())
    return GatewayService(bus, GatewayConfig(), listen=False).metrics().families


def families() -> dict[str, list[Family]]:
    return {
        "Every process": every_process(),
        "Gateways": gateways(),
        "The planner": of_role(lambda metrics: PlannerMetrics(metrics, lambda: None)),
        "The registry": of_role(lambda metrics: RegistryMetrics(metrics, lambda: None)),
        "Nodes": of_role(lambda metrics: NodeMetrics(metrics, lambda: None)),
    }


_METRICS = """# Metrics

Prometheus scrapes every process: gateways at `/metrics` of their own port, other roles at the port
that `planner.metrics_port`, `registry.metrics_port` and `node.metrics_port` name (0, the default:
none), on `telemetry.metrics_host`. Beside `/metrics` there are `/live` (200 as long as the process
answers) and `/ready` (200 if it can do its work, or stands by for the process that does; 503 and
the reason otherwise). None of them asks for a key, so let only those reach them who may see them.

- To readers that accept OpenMetrics, histograms have exemplars: the trace of a request or a scaling
  event.
- Series of models that are gone are removed. A planner or registry that stands by shows what every
  process shows.
- Names that begin with `gen_ai_server` are those of OpenTelemetry's conventions. Names that begin
  with `vllm:` repeat others, for tools that look for vLLM's. The time of tokens is each request's
  mean.
- A request waits at a gateway or on a node. `vllm:num_requests_waiting` is the gateway's; the
  node's is `lambdascale_node_waiting_sequences`.
"""


def metrics_page() -> str:
    parts = [MADE, _METRICS]
    for title, found in families().items():
        rows = [
            f"| `{family.name}` | {family.kind} | "
            f"{', '.join(f'`{label}`' for label in family.labels)} | {family.text} |"
            for family in found
        ]
        head = "| metric | kind | labels | meaning |\n|---|---|---|---|"
        parts.append("\n".join([f"## {title}\n", head, *rows, ""]))
    return "\n".join(parts)


PAGES: dict[str, Callable[[], str]] = {"metrics.md": metrics_page}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
