"""`lambdascale`: the entry point of all commands. Exit codes: 0 done, 1 failed, 2 wrong usage."""

import argparse
import asyncio
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence

from services.cli import completion, run_service, self_test
from services.cli.client import say, silence_logs
from shared.errors import BadInput, ConfigError, LambdaScaleError
from shared.version import __version__

INTERRUPTED = 130
MODULES = {
    "demo": ("demo",),
    "up": ("up", "down"),
    "status": ("status",),
    "top": ("top",),
    "pool": ("pool",),
    "models": ("model", "scale"),
    "events": ("events", "trace"),
    "report": ("report",),
    "plan": ("plan",),
    "simulate": ("simulate",),
    "bench": ("bench",),
    "init": ("init",),
    "tenants": ("tenant",),
    "keys": ("key",),
    "usage": ("usage",),
    "doctor": ("doctor",),
    "logs": ("logs",),
    "self_test": ("test",),
}
"""The commands of each module of this package, in the order of `--help`."""


def make_parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of all commands. If the command line names a command, or a service to run, the
    others may be missing: a process need not import what they stand on."""
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
    asked = argv[0] if argv else ""
    modules = [name for name, theirs in MODULES.items() if asked in theirs]
    is_service = run_service.is_asked_for(argv)
    everything = not (is_service or modules)
    for name in MODULES if everything else modules:
        importlib.import_module(f"services.cli.{name}").add_parser(commands)
    if everything:
        completion.add_parser(commands, make_parser)
    services = run_service.add_parsers(commands)
    if everything:
        from services.cli import nodes

        nodes.add_parsers(services["node"])
    return parser


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
