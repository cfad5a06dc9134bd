"""The reference pages that are made of the code: `python -m tests.support.reference` writes them.

`tests/unit/test_reference.py` compares them with what is there.
"""

import argparse
import ast
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from services.cli.main import make_parser
from services.gateway.service import GatewayService
from services.node.metrics import NodeMetrics
from services.planner.metrics import PlannerMetrics
from services.registry.metrics import RegistryMetrics
from shared import config
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
- `/metrics/picker` of a gateway is for endpoint pickers of Kubernetes' Gateway API Inference
  Extension: one series each of `vllm:num_requests_waiting`, `vllm:num_requests_running`,
  `vllm:kv_cache_usage_perc` and `vllm:lora_requests_info`, for all models together.
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


_CONFIGURATION = """# Configuration

Defaults < file (TOML, `--config FILE`) < environment. One file serves all processes; its tables are
the headings below. In the environment a value is `LAMBDASCALE_TABLE_KEY`, for example
`LAMBDASCALE_PLANNER_IDLE_S=30`; lists have commas between their values. An unknown key refuses to
start. Sizes are in bytes, times in seconds. `deploy/lambdascale.toml.example` is a file to begin
with.
"""


def configuration_page() -> str:
    parts = [MADE, _CONFIGURATION]
    texts = _texts_of_fields(Path(config.__file__))
    for table in msgspec.structs.fields(config.Config):
        rows = [
            f"| `{field.name}` | {_default(field)} | {texts[table.type.__name__][field.name]} |"
            for field in msgspec.structs.fields(table.type)
        ]
        head = "| key | default | meaning |\n|---|---|---|"
        parts.append("\n".join([f"## {table.name}\n", head, *rows, ""]))
    return "\n".join(parts)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is msgspec.NODEFAULT:
        return "the machine's name"  # the only one that is made when a process starts
    return f"`{json.dumps(field.default)}`"


def _texts_of_fields(module: Path) -> dict[str, dict[str, str]]:
    """What stands below each field of each class."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.ClassDef):
            texts = found[node.name] = {}
            for field, text in itertools.pairwise(node.body):
                match field, text:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str() as said)),
                    ):
                        texts[name] = " ".join(said.split()).replace("|", "\\|")
    return found


_COMMANDS = """# Commands

`lambdascale COMMAND --help` says the same in a terminal. Exit codes: 0 done, 1 failed, 2 wrong
usage, 130 interrupted. Results go to standard output, everything else to standard error.
"""


def commands_page() -> str:
    return "\n".join([MADE, _COMMANDS, *_described(make_parser(), "lambdascale", "")])


def _described(parser: argparse.ArgumentParser, name: str, summary: str) -> Iterator[str]:
    """The command, then its subcommands, each with the line that lists it."""
    subcommands: list[tuple[argparse.ArgumentParser, str]] = []
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            listed = {each.dest: each.help or "" for each in action._choices_actions}
            seen = {id(each): (each, word) for word, each in reversed(action.choices.items())}
            for each, word in sorted(seen.values(), key=lambda found: found[1]):
                subcommands.append((each, listed.get(word, "")))
        elif action.dest != "help" and action.help != argparse.SUPPRESS:
            rows.append(f"| {_shown(action)} | {_explained(action)} |")
    if summary:
        yield f"## {name}\n"
        yield f"{summary[0].upper()}{summary[1:].rstrip('.')}.\n"
    if rows:
        yield "\n".join(["| option | meaning |\n|---|---|", *rows, ""])
    for each, text in subcommands:
        yield from _described(each, each.prog, text or each.description or "")


def _shown(action: argparse.Action) -> str:
    value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    names = ", ".join(action.option_strings)
    return f"`{names} {value}`" if value and action.nargs != 0 else f"`{names}`"


def _explained(action: argparse.Action) -> str:
    known = {**vars(action), "prog": "lambdascale"}
    return " ".join(((action.help or "") % known).split()).replace("|", "\\|")


PAGES: dict[str, Callable[[], str]] = {
    "metrics.md": metrics_page,
    "configuration.md": configuration_page,
    "commands.md": commands_page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
