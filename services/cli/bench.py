"""`lambdascale bench`: measurements on this machine. The code is in `benchmarks/`."""

import argparse
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from services.cli.arguments import amount, amount_or_zero, count, counts
from services.cli.client import absolute, add_json_option, print_json, say
from services.planner.core.choose import AUTO
from shared.errors import BadInput

ALL = "all"
DTYPES = ("float32", "bfloat16")
ALL_DTYPES = (*DTYPES, "int8")
MULTICAST = """\
Measures how long a model takes from one node to all others, by strategy, beside what the links
allow, beside torch.distributed over gloo and beside a chain of plain sockets; and the processor
time for each GB that is received and relayed. The nodes are real, each on a host of its own:
network namespaces on this machine, joined by shaped links. It needs root and iproute2, changes
nothing outside of the namespaces, and leaves nothing behind.
"""
SERVING_SOURCE = """\
Measures how many tokens/s a serving node loses while another node loads its model from it: with the
link paced to half and with the whole link, compared with the same node left alone and with a plain
socket copy of the same bytes. Engines have one thread: give the machine two cores or more, and
nothing else to do. It needs root and iproute2, as `multicast` does.
"""
ENGINE = """\
Measures how fast the engine computes on this machine's processor: decode steps of one and of many
sequences, prefills, what a step spends outside of torch's operators, what a shared prefix saves.
The same run measures transformers (if it is installed) with the same checkpoint, threads and
prompts, and the rate at which the machine reads memory. The model is a Llama with random weights.

--llama-cpp measures llama.cpp too, with weights of as many bits (F32, BF16; Q8_0 beside int8), in
turn with the others. It runs in a Python of its own, made like this (the build takes minutes):
  python3 -m venv ~/llama-cpp
  CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_BUILD_TOOLS=OFF" \\
    ~/llama-cpp/bin/pip install llama-cpp-python==0.3.36 gguf
  lambdascale bench engine --dtypes float32,bfloat16,int8 --llama-cpp ~/llama-cpp/bin/python
"""
PIPELINE = """\
Measures whether the stages of a path are busy while it decodes a steady batch: the share of the
time in which each stage is idle; tokens/s, compared with what the slowest stage allows and with the
same path with one micro-batch in flight; and the time from the end of one stage to the start of the
next. Stages are processes, connected by TCP, and take a given time for a step without using the
processor.
"""
CHAOS = """\
Torments a real cluster under load, run after run: in each, a burst of requests makes a model scale
out, and up to three processes are killed, told to end, stopped, cut off, put on a slow link or on
an adapter that resets again and again; in one run of ten half of the nodes are killed at once.
There are three nats-servers, two of each other service, four nodes; each process has a host of its
own (a network namespace; without root and iproute2 the faults of the network are left out). Every
answer is compared with what transformers says. A request may be refused with a clear error, never
lost, hung or wrong; its client comes again to another gateway when its own dies. Each run draws its
faults from a seed of its own: `--runs 1 --seed N` repeats the run with seed N.
"""
CONTROL_PLANE = """\
Measures what planner, registry and a gateway cost by the number of nodes: until they know all,
under a steady load, and when one node's model spreads to all nodes. The services are the real ones,
in virtual time, on a bus within the process. Nodes and the other gateways are simulated, and send
what real ones send. Processor time is real, of one core of this machine; what NATS's client takes
for each message is left out, and what Python's collector of cycles takes, which looks through all
of them at once. Each disk has every model, and requests take 40 % of all slots.
"""


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    parser = subparsers.add_parser(
        "bench", help="measure on this machine", description="Runs one benchmark."
    )
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCH", required=True)
    _add_multicast(benches)
    _add_serving_source(benches)
    _add_engine(benches)
    _add_pipeline(benches)
    _add_chaos(benches)
    _add_control_plane(benches)


def _add_multicast(benches: "argparse._SubParsersAction[Any]") -> None:
    parser = benches.add_parser(
        "multicast",
        help="how long a model takes to N nodes, by strategy, over shaped links",
        description=MULTICAST,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--nodes", type=_sizes, default=(2, 4, 8, 16), metavar="N,N,..",
        help="numbers of nodes, the source included (2,4,8,16)",
    )  # fmt: skip
    parser.add_argument(
        "--strategies", default=ALL, metavar="A,B,..",
        help=f"the planner's strategies; {AUTO} is its own choice (default: {ALL})",
    )  # fmt: skip
    parser.add_argument(
        "--link-mbit", type=amount, default=400.0, metavar="R",
        help="10^6 bits/s of each link in each direction (400). With 16 nodes, more than 800 "
        "measures the processor",
    )  # fmt: skip
    parser.add_argument("--mib", type=count, default=64, help="size of the model in MiB (64)")
    parser.add_argument("--blocks", type=count, default=32, help="blocks of the model (32)")
    parser.add_argument("--runs", type=count, default=3, help="runs of each strategy (3)")
    parser.add_argument(
        "--racks", type=_racks, default=(4, 4), metavar="N,N,..",
        help="also measure nodes in racks of these sizes (4,4); `none`: no racks",
    )  # fmt: skip
    parser.add_argument(
        "--trunk-mbit", type=amount, metavar="R", help="rate of a rack's trunk (default: a link's)"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave gloo and plain sockets out")
    parser.add_argument(
        "--figure", type=absolute, metavar="PATH", help="draw the results (.svg, .png)"
    )
    add_json_option(parser)
    parser.set_defaults(run=run_multicast)


def _add_serving_source(benches: "argparse._SubParsersAction[Any]") -> None:
    parser = benches.add_parser(
        "serving-source",
        help="tokens/s that a source loses while another node loads from it",
        description=SERVING_SOURCE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--link-mbit", type=amount, default=400.0, metavar="R",
        help="10^6 bits/s of each link in each direction (400)",
    )  # fmt: skip
    parser.add_argument("--mib", type=count, default=64, help="size of the model in MiB (64)")
    parser.add_argument("--blocks", type=count, default=16, help="blocks of the model (16)")
    parser.add_argument(
        "--batch", type=count, default=8, help="sequences that are decoded at once (8)"
    )
    parser.add_argument(
        "--window", type=amount, default=2.5, metavar="S",
        help="least seconds of one measurement (2.5)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=count, default=10, help="rounds (10)")
    add_json_option(parser)
    parser.set_defaults(run=run_serving_source)


def _add_engine(benches: "argparse._SubParsersAction[Any]") -> None:
    parser = benches.add_parser(
        "engine",
        help="tokens/s of the engine, beside transformers and beside what memory allows",
        description=ENGINE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=count, default=12, help="layers of the model (12)")
    parser.add_argument(
        "--hidden", type=count, default=768, help="width of the model, a multiple of 192 (768)"
    )
    parser.add_argument(
        "--vocab", type=count, default=32000, help="vocabulary of the model (32000)"
    )
    parser.add_argument(
        "--dtypes", type=_dtypes, default=DTYPES, metavar="T,T,..",
        help=f"dtypes of the weights ({','.join(DTYPES)}); int8: a bfloat16 model's, rounded",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=count, default=16, help="sequences of the large decode batch (16)"
    )
    parser.add_argument(
        "--prompt", type=count, default=512, help="tokens of the longest prompt (512)"
    )
    parser.add_argument(
        "--tokens", type=count, default=16, help="decode steps of each case in a round (16)"
    )
    parser.add_argument("--rounds", type=count, default=5, help="rounds (5)")
    parser.add_argument("--threads", type=count, default=0, help="threads (default: torch's own)")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument(
        "--llama-cpp", default="", metavar="PYTHON",
        help="measure llama.cpp too, with this Python (see above)",
    )  # fmt: skip
    add_json_option(parser)
    parser.set_defaults(run=run_engine)


def _add_pipeline(benches: "argparse._SubParsersAction[Any]") -> None:
    parser = benches.add_parser(
        "pipeline",
        help="how busy the stages of a path are, and how long a hand-over takes",
        description=PIPELINE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--stages", type=_sizes, default=(2, 4), metavar="N,N,..", help="stages of each path (2,4)"
    )
    parser.add_argument(
        "--stage-ms", type=amount_or_zero, default=20.0, metavar="T",
        help="least time of a stage's step (20, the time of a quarter of a model of 8B parameters "
        "in bf16 at 200 GB/s); 0: as fast as the machine computes",
    )  # fmt: skip
    parser.add_argument(
        "--batch",
        type=count,
        default=8,
        help="sequences of a micro-batch; there is one for each stage (8)",
    )
    parser.add_argument(
        "--hidden", type=count, default=512, help="width of the model, a multiple of 64 (512)"
    )
    parser.add_argument(
        "--window", type=amount, default=2.0, metavar="S", help="seconds of a measurement (2)"
    )
    parser.add_argument("--rounds", type=count, default=5, help="rounds (5)")
    add_json_option(parser)
    parser.set_defaults(run=run_pipeline)


def _add_control_plane(benches: "argparse._SubParsersAction[Any]") -> None:
    parser = benches.add_parser(
        "control-plane",
        help="what planner, registry and gateways cost by the number of nodes",
        description=CONTROL_PLANE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--nodes", type=_sizes, default=(10, 100, 1000), metavar="N,N,..",
        help="numbers of nodes (10,100,1000). 3000 takes some minutes",
    )  # fmt: skip
    parser.add_argument("--models", type=count, default=100, help="models (100)")
    parser.add_argument("--gateways", type=count, default=100, help="gateways (100)")
    parser.add_argument(
        "--window", type=amount, default=4.0, metavar="S",
        help="virtual seconds of steady load that are measured (4)",
    )  # fmt: skip
    add_json_option(parser)
    parser.set_defaults(run=run_control_plane)


def run_multicast(args: argparse.Namespace) -> int:
    from benchmarks.multicast import bars, bench, figure  # torch and matplotlib: a second or two

    if min(args.nodes) < 2:
        raise BadInput("--nodes: a multicast is between 2 nodes or more")
    settings = bench.Settings(
        nodes=args.nodes,
        strategies=_strategies(args.strategies, bench.OURS),
        link_mbit=args.link_mbit,
        nbytes=args.mib << 20,
        blocks=args.blocks,
        runs=args.runs,
        racks=args.racks,
        trunk_mbit=args.trunk_mbit or args.link_mbit,
        peers=not args.no_peers,
    )
    results = bench.measure(settings, say)
    if args.figure:
        figure.draw(results, args.figure)
    _show(args, bench.document(results), bench.table(results), bars.bars(results))
    return 0


def run_serving_source(args: argparse.Namespace) -> int:
    from benchmarks.serving_source import bench, results  # torch: a second or two

    settings = results.Settings(
        link_mbit=args.link_mbit,
        nbytes=args.mib << 20,
        blocks=args.blocks,
        batch=args.batch,
        window_s=args.window,
        rounds=args.rounds,
    )
    found = bench.measure(settings, say)
    _show(args, results.document(found), results.table(found), [results.bar(found)])
    return 0


def run_engine(args: argparse.Namespace) -> int:
    from benchmarks.engine import bench, results  # torch: a second or two

    settings = results.Settings(
        layers=args.layers,
        hidden=args.hidden,
        vocab=args.vocab,
        dtypes=args.dtypes,
        batch=args.batch,
        prompt=args.prompt,
        tokens=args.tokens,
        rounds=args.rounds,
        threads=args.threads,
        peer=not args.no_peer,
        llama_cpp=args.llama_cpp,
    )
    found = bench.measure(settings, say)
    _show(args, results.document(found), results.table(found), results.bars(found))
    return 0


def run_pipeline(args: argparse.Namespace) -> int:
    from benchmarks.pipeline import bench, results  # torch: a second or two

    settings = results.Settings(
        stages=args.stages,
        stage_s=args.stage_ms / 1e3,
        batch=args.batch,
        hidden=args.hidden,
        window_s=args.window,
        rounds=args.rounds,
    )
    found = bench.measure(settings, say)
    _show(args, results.document(found), results.table(found), results.bars(found))
    return 0


def _add_chaos(benches: "argparse._SubParsersAction[Any]") -> None:
    parser = benches.add_parser(
        "chaos",
        help="a cluster under load whose processes die, hang and are cut off",
        description=CHAOS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=count, default=200, help="how many runs (200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run (0)")
    parser.add_argument("--tokens", type=count, default=40, help="tokens of each answer (40)")
    parser.add_argument(
        "--lasting", type=amount, default=10.0, metavar="S",
        help="seconds that a process is stopped or cut off, or its link slow or resetting (10)",
    )  # fmt: skip
    parser.add_argument(
        "--silence", type=amount, default=8.0, metavar="S",
        help="seconds without a sign of life after which a client counts as hung (8)",
    )  # fmt: skip
    parser.add_argument(
        "--data", type=absolute, metavar="DIR",
        help="directory for the cluster, with all logs (default: a new one, which is removed if "
        "all went well)",
    )  # fmt: skip
    add_json_option(parser)
    parser.set_defaults(run=run_chaos)


def run_chaos(args: argparse.Namespace) -> int:
    """1 if anything was lost, hung or wrong, or the cluster did not get well."""
    if find_spec("transformers") is None:
        raise BadInput("answers are compared with those of transformers: install that beside this")
    from benchmarks.chaos import bench, results  # torch: a second or two

    settings = bench.Settings(
        args.runs, args.seed, args.tokens, args.lasting, args.silence, args.data
    )
    found = bench.measure(settings, say)
    _show(args, results.document(found), results.table(found), results.bars(found))
    return 0 if all(run.is_good for run in found.runs) else 1


def run_control_plane(args: argparse.Namespace) -> int:
    from benchmarks.control_plane import bench, results

    settings = results.Settings(
        nodes=args.nodes, models=args.models, gateways=args.gateways, window_s=args.window
    )
    found = bench.measure(settings, say)
    _show(args, results.document(settings, found), results.table(found), results.bars(found))
    return 0


def _show(
    args: argparse.Namespace, document: object, table: Iterable[str], bars: Iterable[object]
) -> None:
    """Prints the results, as a table or as a document, and which bars they meet."""
    verdict = [str(bar) for bar in bars]
    if args.json:
        print_json(document)
        say("\n".join(verdict))
    else:
        print("\n".join([*table, "", *verdict]))


def _strategies(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    if text == ALL:
        return known
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in known]:
        raise BadInput(f"--strategies {unknown[0]}: use {ALL} or some of {', '.join(known)}")
    return names


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted(set(counts(text))))


def _racks(text: str) -> tuple[int, ...]:
    return () if text == "none" else counts(text)


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in ALL_DTYPES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(ALL_DTYPES)}")
    return names
