"""A replica that opens: requests run as far as its blocks go, and on as blocks come."""

import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.node.core.batching import Batcher
from services.node.core.rows import Row
from services.node.engine.engine import TorchEngine
from services.node.execution.steps import Steps
from shared.errors import NotFound
from shared.ids import ModelId, NodeId
from shared.messages.serving import Cancel, Submit, Tokens
from tests.support.hash_engine import HashSweep, continuation, hash_manifest
from tests.support.submits import BLOCKS, GATEWAY, MODEL, TWO, WHOLE, submit
from tests.unit.node.engine.models import make_model
from tests.unit.node.execution.test_steps import FROM_C, Rig, free, hidden_states

OTHER = ModelId("other")
PROMPT = (3, 1, 4, 1, 5)


def opening(name: str, *, max_tokens: int = 3) -> Submit:
    return replace(submit(name, WHOLE, prompt=PROMPT, max_tokens=max_tokens), opening=True)


def partly(*held: int) -> Rig:
    """A node that has these blocks."""
    rig = Rig()
    rig.engine.attached[MODEL] = set(held)
    return rig


def attach(rig: Rig, *blocks: int) -> None:
    for block in blocks:
        rig.steps.attach(MODEL, block, memoryview(b""))


def tokens(rig: Rig) -> dict[str, list[int]]:
    """What gateways were told, by request."""
    rig.steps.flush()
    said: dict[str, list[int]] = {}
    for _, message in rig.emitted:
        for token in message.tokens:
            said.setdefault(token.request, []).append(token.token)
    return said


def failures(rig: Rig) -> list[tuple[str, str]]:
    rig.steps.flush()
    return [(f.request, f.code) for _, message in rig.emitted for f in message.failed]


def only_sweep(rig: Rig) -> weakref.ref[HashSweep]:
    """The sweep that the node keeps."""
    sweep = weakref.ref(rig.engine.sweeps.pop())
    assert rig.engine.sweeps == []
    return sweep


RIGHT = continuation(PROMPT, 3, BLOCKS)


def test_a_request_runs_on_with_each_block_that_comes() -> None:
    rig = partly(0, 1)
    rig.submit(opening("r"))
    rig.run()
    (sweep,) = rig.engine.sweeps
    assert sweep.ran == [0, 1]
    attach(rig, 3)
    rig.run()
    assert sweep.ran == [0, 1]
    attach(rig, 2)
    rig.run()
    assert sweep.ran == [0, 1, 2, 3]
    assert tokens(rig) == {}
    attach(rig, 4, 5)
    rig.run()
    assert tokens(rig) == {"r": RIGHT}
    assert rig.engine.sequences == {}


def test_other_models_run_while_a_sweep_waits() -> None:
    rig = partly(0)
    rig.steps.open_model(OTHER, hash_manifest(BLOCKS))
    for block in range(BLOCKS):
        rig.steps.attach(OTHER, block, memoryview(b""))
    rig.submit(opening("r"))
    rig.run()
    rig.submit(replace(submit("o", WHOLE, prompt=PROMPT, max_tokens=3), model_id=OTHER))
    rig.run()
    assert tokens(rig) == {"o": RIGHT}
    attach(rig, *range(1, BLOCKS))
    rig.run()
    assert tokens(rig)["r"] == RIGHT


def test_requests_that_come_later_do_not_wait_for_those_that_are_stuck() -> None:
    rig = partly(0)
    rig.submit(opening("first"))
    rig.run()
    attach(rig, 1)
    rig.submit(opening("second"))
    rig.run()
    assert [sweep.ran for sweep in rig.engine.sweeps] == [[0, 1]] * 2
    attach(rig, *range(2, BLOCKS))
    rig.run()
    assert tokens(rig) == {"first": RIGHT, "second": RIGHT}


def test_the_time_for_which_a_sweep_was_stuck_is_not_the_engines() -> None:
    rig = partly(0)
    rig.submit(opening("r", max_tokens=1))
    rig.steps.begin(100.0)
    rig.steps.finish(101.0)
    rig.steps.begin(101.0)
    rig.steps.finish(101.0)
    assert rig.steps.begin(150.0) is None
    attach(rig, *range(1, BLOCKS))
    rig.steps.begin(200.0)
    while rig.steps.load.running:
        rig.steps.finish(202.0)
        rig.steps.begin(202.0)
    ((_, share, positions, seconds),) = rig.ran
    assert (share, positions, seconds) == (1.0, 5.0, 3.0)


def test_a_request_that_is_stuck_can_be_cancelled() -> None:
    rig = partly(0)
    rig.submit(opening("gone"))
    rig.submit(opening("stays"))
    rig.run()
    rig.steps.cancel(Cancel(request=opening("gone").request, attempt=1))
    attach(rig, *range(1, BLOCKS))
    rig.run()
    assert tokens(rig) == {"stays": RIGHT}
    assert rig.engine.sequences == {}
    assert rig.steps.load.running == 0


def test_a_model_that_is_closed_ends_what_waits_for_its_blocks() -> None:
    rig = partly(0)
    rig.submit(opening("r"))
    rig.run()
    sweep = only_sweep(rig)
    rig.steps.close_model(MODEL)
    assert failures(rig) == [("r", "not_found")]
    assert sweep() is None
    rig.steps.open_model(MODEL, hash_manifest(BLOCKS))
    attach(rig, *range(BLOCKS))
    rig.submit(opening("new"))
    rig.run()
    assert tokens(rig) == {"new": RIGHT}
    assert rig.engine.sequences == {}


def test_everything_that_waits_ends_with_the_node() -> None:
    rig = partly(0)
    rig.submit(opening("r"))
    rig.run()
    rig.steps.close()
    assert failures(rig) == [("r", "not_found")]


def test_a_step_that_fails_ends_what_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = partly(0)
    rig.submit(opening("waits"))
    rig.run()
    sweep = only_sweep(rig)
    rig.submit(opening("new"))

    def fails(*_: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(Batcher, "take", fails)
        rig.step()
    assert sorted(failures(rig)) == [("new", "engine_failed"), ("waits", "engine_failed")]
    assert sweep() is None
    assert rig.engine.sequences == {}


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ((0, 1), submit("r", WHOLE)),
        ((1, 2), opening("r")),
        ((0,), replace(submit("r", TWO), opening=True)),
    ],
    ids=["not told that it opens", "without the first block", "a path"],
)
def test_other_requests_are_refused_where_blocks_are_missing(
    held: tuple[int, ...], message: Submit
) -> None:
    rig = partly(*held)
    with pytest.raises(NotFound, match="does not hold blocks"):
        rig.steps.submit(message)
    assert not rig.step()


def test_stages_of_paths_run_beside_a_sweep_that_is_stuck() -> None:
    rig = partly(0, 2, 3, 4, 5)
    rig.submit(opening("r", max_tokens=1))
    rig.run()
    rig.receive(FROM_C, (Row("x#1", 0, 1, 9),), hidden_states(1))
    rig.run()
    assert [sweep.ran for sweep in rig.engine.sweeps] == [[0], [2, 3, 4, 5]]
    free(rig, "x#1")
    attach(rig, 1)
    rig.run()
    assert tokens(rig) == {"r": RIGHT[:1]}


FAMILIES = {"llama": {}, "qwen3": {"head_dim": 16}, "mistral": {"sliding_window": 9}}
MODELS = {name: make_model(model_type=name, **changes) for name, changes in FAMILIES.items()}
PROMPTS = ((3,), tuple(range(7, 40)), tuple((7 * i + i // 5) % 96 for i in range(90)))


@given(
    family=st.sampled_from(sorted(FAMILIES)),
    came=st.permutations(range(1, 6)),
    steps=st.lists(st.integers(0, 12), min_size=8, max_size=8),
    at=st.lists(st.integers(0, 6), min_size=3, max_size=3),
)
def test_tokens_are_those_of_transformers_whenever_blocks_and_requests_come(
    family: str, came: list[int], steps: list[int], at: list[int]
) -> None:
    """`steps`: how many are taken before each block. `at`: after how many blocks each request."""
    model = MODELS[family]
    said: dict[str, list[int]] = {}

    def emit(_: object, message: Tokens) -> None:
        assert not message.failed
        for token in message.tokens:
            said.setdefault(token.request, []).append(token.token)

    rig = Steps(
        node=NodeId("a"), engine=TorchEngine("cpu", 600, threads=1), slots=4, step_tokens=64,
        send=lambda *message: None, emit=emit, ran=lambda *sweep: None,
    )  # fmt: skip
    rig.open_model(MODEL, model.manifest)
    assert model.manifest.n_blocks == BLOCKS
    for number, block in enumerate([0, *came, None]):
        if block is not None:
            rig.attach(MODEL, block, memoryview(model.buffers[block]))
        for request, prompt in enumerate(PROMPTS):
            if at[request] == number:
                sent = submit(f"r{request}", WHOLE, prompt=prompt, max_tokens=4, gateway=GATEWAY)
                rig.submit(replace(sent, opening=True))
        for _ in range(steps[number]):
            rig.begin(0.0)
            rig.finish(0.0)
    while rig.begin(0.0) is not None:
        rig.finish(0.0)
    rig.flush()
    assert said == {
        f"r{request}": model.expected_tokens(list(prompt), 4)
        for request, prompt in enumerate(PROMPTS)
    }
