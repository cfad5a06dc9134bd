"""The command line of a benchmark that has no options."""

import argparse


def describe(name: str, doc: str | None) -> None:
    """Prints `doc`, the benchmark's own, for --help, and ends. Refuses any other argument."""
    argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
