"""Runs a foreign client's own test suite, unmodified, against a cluster on this machine.

Run: .venv/bin/python -m benchmarks.clients --suite NAME. It makes an environment for the suite
under the user's cache, starts a cluster of two nodes with a small model, prints what the suite
prints, and ends with its status. docs/clients.md has the results, and why what fails fails.
"""

import argparse
import asyncio
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.clients.environment import bin_of
from benchmarks.clients.served import MODEL, served
from benchmarks.clients.suites import SUITES

NODES = 2


async def run(name: str) -> int:
    """The suite's status."""
    suite = SUITES[name]
    programs = bin_of(suite.packages) if suite.packages else Path()
    here = Path(__file__).parent
    async with served(NODES, here / suite.lessons if suite.lessons else None) as at:
        with tempfile.TemporaryDirectory() as out:
            command = suite.command.format(
                bin=programs,
                url=at.url,
                model=MODEL,
                checkpoint=at.checkpoint,
                here=here,
                out=out,
            )
            print(f"$ {command}", flush=True)
            process = await asyncio.create_subprocess_exec(*shlex.split(command), cwd=out)
            return await process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="suites:\n" + "\n".join(f"  {n:<22}{s.about}" for n, s in SUITES.items()),
    )
    parser.add_argument("--suite", required=True, choices=SUITES, metavar="NAME")
    try:
        return asyncio.run(run(parser.parse_args().suite))
    except subprocess.CalledProcessError as error:
        print(f"the suite cannot be installed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
