"""What `lambdascale status` prints for people: the document as tables."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from services.cli.model_set import rules, wanted

Document = Mapping[str, Any]
PIPED_WIDTH = 160
COLUMNS = """\
columns:
  processes  part: which planner and which registry is active, and which stand by; since: when the
             process was started; restarts: how many processes ended in its place
             before, and how the last of them ended
  models     replicas: complete copies that serve; paths: sets of nodes that serve with a part of
             the model each, while it is loaded; wanted: what the autoscaler may choose from, or
             what `lambdascale scale` set by hand; rules: what `lambdascale model set` has set
             besides: objectives, schedule (UTC), ...
  nodes      free MB: memory for weights; KV used: share of the memory for sequences that is taken;
             prompts cached: share of all prompt tokens that were found in it; preempted: sequences
             that gave up their place in it to others; peers: connections, by transport; blocks:
             how many of a model's blocks lie where
  instances  role: whether it prefills, decodes, or does both; capacity: throughput in units of a
             complete replica; slots: sequences at once; left alone by: gateways that send it
             nothing for now, or one request at a time, and why: it failed, or is much slower
             than others
  events     seconds: until every target had the whole model
"""


def console() -> Console:
    """Standard output, wide enough for a program that reads it."""
    out = Console(file=sys.stdout, highlight=False)
    if not out.is_terminal:
        out.width = PIPED_WIDTH
    return out


def print_status(document: Document) -> None:
    out = console()
    if urls := document["gateway_urls"]:
        out.print(f"[bold]{'gateway' if len(urls) == 1 else 'gateways'}[/]")
        out.print("\n".join(urls))
    for role, one in document["active"].items():
        out.print(f"active {role}: process {one['pid']} on {one['host']}, term {one['term']}")
    for title, rows in (
        ("processes", document["processes"] and _processes(document)),
        ("models", _models(document)),
        ("nodes", _nodes(document)),
        ("instances", _instances(document)),
        ("events", _events(document)),
    ):
        if rows or title != "processes":
            print_table(out, title, rows)
    for lacking in document["shortfall"]:
        out.print(f"\n{lacking['model']} has {lacking['text']} (`lambdascale pool`)")


def _processes(document: Document) -> list[Document]:
    return [
        {
            **{key: process[key] for key in ("name", "pid", "state", "part", "since", "restarts")},
            "last exit": process["last_exit"],
        }
        for process in document["processes"]
    ]


def _models(document: Document) -> list[Document]:
    def serving(name: str) -> list[bool]:
        """For each instance that serves it, whether that is a replica or a group."""
        return [
            instance["group"] or len(instance["stages"]) == 1
            for instance in document["instances"]
            if instance["model"] == name and instance["state"] == "serving"
        ]

    return [
        {
            "name": model["name"],
            "MB": f"{model['nbytes'] / 1e6:.1f}",
            "blocks": model["n_blocks"],
            "replicas": sum(serving(model["name"])),
            "paths": sum(not lasts for lasts in serving(model["name"])),
            "wanted": wanted(model["min_instances"], model["max_instances"], model["fixed"]),
            **({"rules": rules(model)} if any(map(rules, document["models"])) else {}),
        }
        for model in document["models"]
    ]


def _nodes(document: Document) -> list[Document]:
    sizes = {model["name"]: model["n_blocks"] for model in document["models"]}
    return [
        {
            "id": node["id"],
            "state": _state(node),
            "device": _device(node),
            "free MB": f"{node['arena_free'] / 1e6:.0f}",
            "KV used": _share(node["kv_used"], node["kv_capacity"]),
            "prompts cached": _share(node["cached_tokens"], node["prompt_tokens"]),
            "preempted": node["preemptions"],
            "peers": ", ".join(f"{way} {len(nodes)}" for way, nodes in node["peers"].items()),
            "blocks": _blocks(node, sizes),
        }
        for node in document["nodes"]
    ]


def _state(node: Document) -> str:
    duty = "" if node["duty"] == "all" else node["duty"]
    return ": ".join(filter(None, (", ".join(filter(None, (node["state"], duty))), node["unfit"])))


def _instances(document: Document) -> list[Document]:
    faulty = any(instance["kept_out"] for instance in document["instances"])
    return [
        {
            **{key: instance[key] for key in ("id", "model", "state", "role", "capacity", "slots")},
            "blocks": " -> ".join(
                f"{stage['node']} {stage['blocks'][0]}-{stage['blocks'][1] - 1}"
                for stage in instance["stages"]
            ),
            **({"left alone by": _kept_out(instance)} if faulty else {}),
        }
        for instance in document["instances"]
    ]


def _kept_out(instance: Document) -> str:
    return "; ".join(f"{gateway} ({why})" for gateway, why in instance["kept_out"].items())


def _events(document: Document) -> list[Document]:
    return [
        {
            **{key: event[key] for key in ("id", "model", "state")},
            "targets": ",".join(_target(node, event["parts"]) for node in event["targets"]),
            "seconds": "" if seconds is None else f"{seconds:.2f}",
            "why": event["error"] or event["cause"],
        }
        for event in document["events"]
        for seconds in (event["actual"]["all_complete_s"],)
    ]


def _target(node: str, parts: Document) -> str:
    return f"{node} {parts[node][0]}-{parts[node][1] - 1}" if node in parts else node


def _device(node: Document) -> str:
    return f"{node['device']}, from {node['staging']}" if node["staging"] else str(node["device"])


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _blocks(node: Document, sizes: Mapping[str, int]) -> str:
    """`m: memory 9/16, disk 16/16`"""
    return "; ".join(
        f"{model}: "
        + ", ".join(
            f"{_place(tier, node['device'])} {len(held)}/{sizes.get(model, '?')}"
            for tier, held in tiers.items()
        )
        for model, tiers in node["blocks"].items()
    )


def _place(tier: str, device: str) -> str:
    """What a tier is on the device: where the engine computes, `gpu`, is a CPU's own memory."""
    return "memory" if tier == "gpu" and device == "cpu" else tier


def print_table(out: Console, title: str, rows: Sequence[Document]) -> None:
    out.print(f"\n[bold]{title}[/]")
    if not rows:
        out.print("none")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 2), header_style="dim")
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*_cells(row.values()))
    out.print(table)


def _cells(values: Iterable[Any]) -> list[str]:
    return [
        "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
        for value in values
    ]
