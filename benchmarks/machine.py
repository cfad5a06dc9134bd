"""The machine that a figure was measured on."""

import os
import platform
from pathlib import Path


def machine() -> str:
    """The processor, and how many of its cores this process may use."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"
