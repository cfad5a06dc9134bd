"""Where the planner's shell computes."""

import threading

from services.planner.shell import FEW, compute


async def test_what_is_about_few_nodes_is_computed_at_once_and_the_rest_in_a_thread() -> None:
    here = threading.get_ident()
    assert await compute(FEW, threading.get_ident) == here
    assert await compute(FEW + 1, threading.get_ident) != here
