"""Imported before torch is in a process that computes."""

import os

# Threads of OpenMP spin while they wait for each other, by default for some 10 ms: of a machine
# that others use too, most of two threads' time was lost so. After about 50 us (as in team.c) they
# now sleep. OpenMP reads this once, when torch loads it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
