"""The scenario of the demo: the cluster, its paces, and the burst."""

from shared.ids import ModelName

NODES = 5
MODEL = ModelName("demo")
COPY_S = 5.0
"""Seconds that one full copy takes over one link."""
SLOTS = 8
STEP_FLOOR_S = 0.060
ARENA_SPARE = 1.25
FIRST_WAVE = 56
"""Number of requests that come at once. The others follow at RATE."""
RATE = 12.0
REQUESTS = 120
TOKENS = 48
