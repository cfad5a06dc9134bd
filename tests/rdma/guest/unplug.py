"""Switches an adapter off, for good: `python -m tests.rdma.guest.unplug eth0`."""

import subprocess
import sys

if __name__ == "__main__":
    subprocess.run(["ip", "link", "set", sys.argv[1], "down"], check=True)
