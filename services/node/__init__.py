"""Imported before torch is in a process that computes."""

import os

# OpenMP's threads wait for each other in a loop, by default for some 10 ms. On a machine that other
# programs use too, two threads lost most of their time that way. This lets them sleep after about
# 50 us, as ranks do (team.c). OpenMP reads the variable once, when torch loads it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
