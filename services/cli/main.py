"""`lambdascale`: the operator's door. Exit codes: 0 done, 1 failed, 2 wrong usage."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from services.cli import (
    demo,
    events,
    keys,
    models,
    plan,
    run_service,
    self_test,
    status,
    up,
)
from shared.errors import BadInput, ConfigError, LambdaScaleError


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lambdascale",
        description="Serverless LLM inference that scales in the time it takes to move the "
        "weights once, and serves while they move.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (demo, up, status, models, events, plan, keys, self_test):
        module.add_parser(commands)
    run_service.add_parsers(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.run is not self_test.run:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest
    try:
        return int(args.run(args))
    except LambdaScaleError as error:
        sys.stderr.write(f"lambdascale: {error}\n")
        return 2 if isinstance(error, BadInput | ConfigError) else 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
