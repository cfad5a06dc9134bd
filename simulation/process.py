"""Runs one system in a process of its own: `python -m simulation.process SYSTEM SETTING RESULT`.

SETTING is read and RESULT written as MessagePack. Standard output gets a line of progress (virtual
seconds) now and then, and nothing else. If nobody reads it any more, the run ends. Exit code 2
means that the setting cannot be run; the last line of standard error says why.
"""

import gc
import logging
import sys
import time
from pathlib import Path

import msgspec
import structlog

from shared import telemetry
from shared.config import TelemetryConfig
from shared.errors import BadInput, ConfigError
from simulation.run import run_system
from simulation.setting import Setting

TELL_EVERY_S = 1.0
GARBAGE = 500_000
"""Objects made between two looks for cycles. A large cluster has millions of objects that live on,
and few cycles."""


def main(system: str, setting: Path, result: Path) -> int:
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    told_at = time.monotonic()

    def progress(virtual_s: float) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= TELL_EVERY_S:
            told_at = time.monotonic()
            print(virtual_s, flush=True)

    telemetry.configure("simulation", TelemetryConfig(log_level="off"))
    try:
        run = run_system(
            system, msgspec.msgpack.decode(setting.read_bytes(), type=Setting), progress
        )
    except (BadInput, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    result.write_bytes(msgspec.msgpack.encode(run))
    return 0


if __name__ == "__main__":
    gc.freeze()  # imported objects stay
    gc.set_threshold(GARBAGE)
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
