"""`lambdascale`: the entry point of all commands. Exit codes: 0 done, 1 failed, 2 wrong usage."""

import argparse
import asyncio
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any

from services.cli import run_service, self_test
from services.cli.client import say, silence_logs
from shared.errors import BadInput, ConfigError, LambdaScaleError
from shared.version import __version__

INTERRUPTED = 130


def make_parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of all commands. If a service is asked for, that of the services alone: a process
    of a cluster need not import what the other commands stand on."""
    parser = argparse.ArgumentParser(
        prog="lambdascale",
        description="Serverless LLM inference that scales in the time it takes to move the "
        "weights once, and serves while they move.",
        epilog="`lambdascale COMMAND --help` says more. Exit codes: 0 done, 1 failed, "
        f"2 wrong usage, {INTERRUPTED} interrupted. Results go to standard output, everything "
        "else to standard error.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    only_services = run_service.is_asked_for(argv)
    if not only_services:
        _add_commands(commands)
    services = run_service.add_parsers(commands)
    if not only_services:
        from services.cli import nodes

        nodes.add_parsers(services["node"])
    return parser


def _add_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    from services.cli import (
        bench,
        completion,
        demo,
        doctor,
        events,
        init,
        keys,
        logs,
        models,
        plan,
        pool,
        report,
        simulate,
        status,
        tenants,
        top,
        up,
        usage,
    )

    for module in (
        demo,
        up,
        status,
        top,
        pool,
        models,
        events,
        report,
        plan,
        simulate,
        bench,
        init,
        tenants,
        keys,
        usage,
        doctor,
        logs,
        self_test,
    ):
        module.add_parser(commands)
    completion.add_parser(commands, make_parser)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser(argv)
    args, rest = parser.parse_known_args(argv)
    if rest and args.run is not self_test.run:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest
    in_service = args.run is run_service.run
    if not in_service:
        silence_logs()
    try:
        code = int(args.run(args))
        sys.stdout.flush()
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _explain(error, in_log=in_service)
    return code


def _explain(error: Exception, *, in_log: bool) -> int:
    """Says in one line what failed. `in_log`: standard error is a service's log."""
    cause = error
    while isinstance(cause, ExceptionGroup):
        cause = cause.exceptions[0]
    if isinstance(cause, LambdaScaleError):
        say(f"lambdascale: {cause}")
        return 2 if isinstance(cause, BadInput | ConfigError) else 1
    if isinstance(cause, OSError) and cause.filename and not in_log:
        say(f"lambdascale: {cause.filename}: {cause.strerror}")
        return 1
    text = "".join(traceback.format_exception(error))
    if in_log:
        say(text)
        where = "above"
    else:
        with tempfile.NamedTemporaryFile(
            "w", prefix="lambdascale-", suffix=".log", delete=False
        ) as log:
            log.write(text)
        where = f"in {log.name}"
    say(f"lambdascale: unexpected {type(cause).__name__}: {cause}; the traceback is {where}")
    return 1
