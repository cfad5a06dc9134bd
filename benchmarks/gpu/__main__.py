"""The engine on a GPU, beside what the GPU can do and beside transformers, in one run. Weights are
random, of real shapes, and made on the device.

    python -m benchmarks.gpu [--shapes llama-3-8b,llama-2-13b] [--runs 5] [--no-peer] [--json]

Bars: decode of one sequence >= 0.75 of the rate at which memory is read; of 64 sequences >= 3 x
transformers; prefill >= 0.55 of the largest matrix product's rate; host to device >= 0.9 of a plain
copy. Figures are printed as they come. Each part runs in a process of its own, so that a failure
costs no other part's figures. Exit code 1: a bar was missed or a part failed; 2: there is no GPU.

`--shapes tiny` runs on a CPU, too, to check that everything works.
"""

import argparse
import json
import sys
import time

import torch

from benchmarks.gpu import limits, ours, peer
from benchmarks.gpu.apart import Figures, measured
from benchmarks.gpu.cases import Case, of_device, of_model
from benchmarks.gpu.scale import SHAPES, TINY

PART_S = 180.0
"""The most seconds that a part may take. All parts together may take `--limit`."""


class Run:
    def __init__(self, device: str, runs: int, limit_s: float) -> None:
        self._device, self._runs = device, runs
        self._deadline = time.monotonic() + limit_s
        self.failed: dict[str, str] = {}

    def part(self, name: str, figures: Figures, shape: str) -> dict[str, float]:
        """The figures of the part that came."""
        found: dict[str, float] = {}
        limit_s = min(PART_S, self._deadline - time.monotonic())
        for told in measured(figures, shape, self._device, self._runs, limit_s):
            if isinstance(told, str):
                self.failed[f"{name}, {shape}"] = told
                _say(f"{name}, {shape}: FAILED: {told}")
            else:
                found[told[0]] = told[1]
                _say(f"{name}, {shape}: {told[0]} {told[1]:.6g}")
        return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _shapes(given: str) -> list[str]:
    names = given.split(",")
    if unknown := [name for name in names if name not in SHAPES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(SHAPES)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", type=_shapes, default=["llama-3-8b", "llama-2-13b"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for all of it (560)")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and arguments.shapes != [TINY]:
        _say(
            "benchmarks.gpu needs a CUDA device, and torch finds none here; --shapes tiny does not"
        )
        return 2
    name = torch.cuda.get_device_name(device) if device != "cpu" else device
    run = Run(device, arguments.runs, arguments.limit)
    measured_limits = run.part("limits", limits.figures, arguments.shapes[0])
    cases = list(of_device(measured_limits))
    for shape in arguments.shapes:
        found = run.part("ours", ours.figures, shape)
        theirs = {} if arguments.no_peer else run.part("transformers", peer.figures, shape)
        cases += of_model(shape, measured_limits, found, theirs)
    if arguments.json:
        rows = [case.row(name) for case in cases]
        print(json.dumps({"rows": rows, "failed": run.failed}))
    else:
        print(name)
        for case in cases:
            print(_line(case))
    return 1 if run.failed or any(case.missed for case in cases) else 0


def _line(case: Case) -> str:
    ratio = "" if case.ratio is None else f"   {case.ratio:.2f} x transformers"
    share = "" if case.share is None else f"   {case.share:.2f} of what the device can"
    return f"{case.name:<48} {case.ours:10.2f} {case.unit}{ratio}{share}"


if __name__ == "__main__":
    sys.exit(main())
