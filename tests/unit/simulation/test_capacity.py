"""A node on paper agrees with the modelled engine's terms, and grows and shrinks as it should."""

import pytest

from shared.errors import BadInput
from simulation.capacity import Capacity
from simulation.engine import Costs
from simulation.hardware import hardware
from simulation.models import model


def capacity(name: str = "llama-2-13b", slots: int = 32) -> Capacity:
    return Capacity(model(name), hardware("h800-400g"), slots)


def test_a_lone_step_reads_the_weights_once() -> None:
    node = capacity()
    reading_s = node.model.nbytes / node.hardware.read_bytes_per_s
    assert reading_s < node.step_s(1, 1) < 1.5 * reading_s


def test_long_prompts_take_more_passes() -> None:
    node = capacity()
    assert node.prefill_s(1024) > node.prefill_s(512) + node.hardware.sweep_overhead_s
    # One token less context and one pass less.
    assert node.prefill_s(513) - node.prefill_s(512) > node.model.nbytes / 2 / (
        node.hardware.read_bytes_per_s
    )


def test_a_pass_attends_to_all_before_it() -> None:
    node = capacity()
    pairs = sum(512 + n + 1 for n in range(512))
    layers_s = Costs(node.model, node.hardware).layers(node.model.layers, 512, 1024, pairs)
    second_s = node.prefill_s(1024) - node.prefill_s(512)
    assert second_s == pytest.approx(layers_s + node.hardware.sweep_overhead_s)


def test_a_full_node_does_more_than_requests_one_by_one() -> None:
    alone = capacity(slots=1).work_s(100, 200)
    assert alone == pytest.approx(capacity().prefill_s(100) + 199 * capacity().step_s(1, 200))
    assert capacity().work_s(100, 200) < alone / 5


def test_memory_limits_the_batch() -> None:
    node = capacity()
    assert node.batch(100) == 32
    room = 0.9 * 80e9 - node.model.nbytes
    assert node.batch(4096) == int(room / (4096 * node.model.kv_bytes)) < 32
    assert node.batch(10**6) == 1


def test_a_model_that_does_not_fit() -> None:
    with pytest.raises(BadInput, match="llama-2-70b takes 138 GB: more than a node of h800-400g"):
        capacity("llama-2-70b")
