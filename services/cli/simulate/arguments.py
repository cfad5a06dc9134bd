"""What `lambdascale simulate` can be told, and its help."""

import argparse
import math
from pathlib import Path

from services.cli.arguments import amount, amount_or_zero, count, whole
from services.cli.client import absolute, add_json_option
from services.cli.simulate.sweep import DEFAULT, grid
from simulation.systems import COMPARED, SYSTEMS

FIT = "fit"
EACH = "*"
SLO_FACTOR = 5.0
DATA = Path(__file__).parents[3] / "simulation" / "data"
DESCRIPTION = """\
Replays a workload on a cluster of modelled nodes, once for each system, and compares what their
clients and their operators saw: latencies, requests served in time, accelerators held, memory.
The control plane is the real one, on a clock that skips the waiting. Links, memory and
accelerators are models of the named hardware. The same arguments give the same numbers.

systems (--systems):
{systems}

models:   {models}
hardware: {hardware}

workloads (--trace):
  FILE                            a recorded trace as its publishers give it (Azure LLM inference
                                  CSV, BurstGPT CSV, Mooncake JSON lines), or a CSV with the header
                                  arrival_s,prompt_tokens,output_tokens,model
  spike:rate=20,seconds=30        nothing for idle=5 s, then 20 requests a second (Poisson)
  gamma:rate=4,cv=8,seconds=600   bursts: gaps of a Gamma distribution
  poisson:rate=4,seconds=600      no bursts
  hourly:file=FILE,day=9          from counts by hour (day,hour,...), column=all, compress=1
  The last four are synthetic and take prompt=1024,output=128 (tokens) as well, and
  models=1,skew=0: each request is for one of this many models, the n-th with a frequency of
  1 / n^skew.
"""
EXAMPLES = """\
examples:
  lambdascale simulate --trace spike:rate=30,seconds=20 --systems lambdascale,serverlessllm
  lambdascale simulate --trace AzureLLMInferenceTrace_code.csv --nodes 12 --plots figures --jobs 4
  lambdascale simulate --trace AzureLLMInferenceTrace_code.csv --until 300 --sweep --plots figures
  lambdascale simulate --trace both.csv --model code=llama-2-7b,chat=llama-2-13b --until 600
  lambdascale simulate --trace poisson:rate=50,seconds=20,models=100,skew=1 --nodes 1000 \\
      --racks 50 --model '*=llama-3.1-8b' --systems lambdascale   (a minute or two, 2.2 GB)
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "simulate",
        help="compare systems on a recorded workload, in virtual time",
        description=DESCRIPTION.format(
            systems="\n".join(f"  {s.name:<18} {s.what}" for s in SYSTEMS.values()),
            models=_known("models"),
            hardware=_known("hardware"),
        ),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_workload(parser)
    _add_cluster(parser)
    slo = parser.add_argument_group(
        "SLO", f"by default {SLO_FACTOR:g} times what a request of its length takes on an idle node"
    )
    slo.add_argument("--slo-ttft-ms", type=amount, metavar="MS", help="time to the first token")
    slo.add_argument(
        "--slo-tpot-ms", type=amount, metavar="MS", help="time of each token after the first"
    )
    parser.add_argument(
        "--sweep", type=grid, nargs="?", const=grid(DEFAULT), metavar="S,...:N,...[:MS,...]",
        help="simulate every combination of keep-alive times, numbers of instances that stay, and "
        "objectives for TTFT (0: none; not given: the SLO), and show the frontier: TTFT p90 "
        "against device seconds. Only of lambdascale, unless --systems names others (default "
        f"combinations: {DEFAULT})",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=count, default=1, metavar="N", help="systems simulated at once (1)"
    )
    parser.add_argument(
        "--plots", type=absolute, metavar="DIR", help="draw the comparison: PNGs in this directory"
    )
    add_json_option(parser)
    return parser


def _known(kind: str) -> str:
    return ", ".join(sorted(path.stem for path in (DATA / kind).glob("*.toml")))


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--trace", required=True, metavar="FILE|KIND:...", help="the workload, see above"
    )
    group.add_argument(
        "--from", dest="from_s", type=amount_or_zero, default=0.0, metavar="S",
        help="begin at this second of the trace (0)",
    )  # fmt: skip
    group.add_argument(
        "--until", dest="until_s", type=amount_or_zero, default=math.inf, metavar="S",
        help="end before this second of the trace",
    )  # fmt: skip
    group.add_argument(
        "--rate-factor", type=_factor, metavar=f"F|{FIT}",
        help=f"thins requests (below 1) or copies them (above 1) without stretching time; {FIT}: "
        f"the peak just fits when every node serves (default: {FIT}; 1 for synthetic workloads)",
    )  # fmt: skip
    group.add_argument(
        "--streams", type=count, default=0, metavar="N",
        help="N models, each with all these requests as its own stream; the streams are shifted "
        "in time and wrap around, so --until is needed",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=int, default=0,
        help="seed of everything random. 0, the default: the trace as it was recorded, on equal "
        "disks. Others move arrivals a little and make some disks slower",
    )  # fmt: skip


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--systems",
        type=_systems,
        metavar="A,B,...",
        help=f"systems (default: {','.join(COMPARED)})",
    )
    group.add_argument(
        "--model", default="llama-2-13b", metavar="MODEL|NAME=MODEL,...",
        help="the model that serves every request, or one for each model of the trace; "
        f"{EACH}=MODEL: every other model of the trace is a model of its own, of this "
        "architecture (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--nodes", type=count, default=12, metavar="N", help="nodes (default: %(default)s)"
    )
    group.add_argument(
        "--racks", type=count, default=1, metavar="N", help="racks (default: %(default)s)"
    )
    group.add_argument(
        "--hardware",
        default="h800-400g",
        metavar="NAME",
        help="hardware of every node (default: %(default)s)",
    )
    group.add_argument(
        "--slots", type=count, default=32, metavar="N",
        help="requests that a complete node runs at once (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--disk-copies", type=whole, default=0, metavar="N",
        help="disks that have each model at the beginning; systems that load from local disks have "
        "it on all (default: 0: all)",
    )  # fmt: skip
    group.add_argument(
        "--keep-alive", type=amount_or_zero, default=2.0, metavar="S",
        help="seconds for which a replica is kept that is not needed (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--target", type=_share, metavar="SHARE",
        help="the share of a replica that the load is meant to fill (default: 1 with our scaler, "
        "0.5 with others)",
    )  # fmt: skip
    group.add_argument(
        "--min-instances", type=whole, default=1, metavar="N",
        help="replicas of each model that stay when nobody asks for it; 0: the model sleeps "
        "until somebody does (default: %(default)s)",
    )  # fmt: skip


# --- values -----------------------------------------------------------------


def _systems(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no system {unknown[0]!r}; there are {', '.join(SYSTEMS)}"
        )
    return names


def _share(text: str) -> float:
    share = amount(text)
    if share > 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at most 1")
    return share


def _factor(text: str) -> float | str:
    return FIT if text == FIT else amount(text)
