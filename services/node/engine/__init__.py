"""Torch runs the blocks here. Imported before torch multiplies anything in this process."""

import os
from pathlib import Path


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


# A row's bits must not depend on how many rows there are (attention.py says why). On Intel's
# processors MKL keeps that promise only in its strict mode. On AMD's it keeps it only without: in
# the strict mode it divides few outputs among threads, and pieces of fewer than 12 get other bits
# than whole rows.
if not _is_amd():
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
