"""Ranks that are killed where each model has a degree of its own: what is left goes on."""

import ctypes
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path as Folder
from typing import Any

import pytest

from services.node.engine.base import MakeAdapter
from services.node.engine.engine import TorchEngine
from services.node.engine.ranks import Ranks
from services.node.engine.rehearsal import measure
from shared.errors import EngineFailed
from shared.ids import ModelId
from shared.layout import Manifest
from tests.unit.node.engine.models import MODEL, make_model, part, row, run
from tests.unit.node.engine.test_adapters import SPECS, Adapted, with_adapter
from tests.unit.node.engine.test_ranks import (
    COUNT,
    FOUR_KV_HEADS,
    PROMPT,
    Chosen,
    choosing,
    costs,
)

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
__all__ = ["choosing"]

LIMIT_S = 60.0
ASLEEP = 132
"""Where in a Team (kernels.h) it says how many ranks sleep."""
TWO = {1: 1e9, 2: 2e9}
FOUR = {1: 1e9, 2: 2e9, 4: 4e9}


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def sleeps(ranks: Ranks, degree: int) -> bool:
    """Whether somebody of a team waits for the others."""
    return ctypes.c_int32.from_address(ranks.teams[degree].address + ASLEEP).value > 0


@contextmanager
def killed_while_waited_for(ranks: Ranks, rank: int, degree: int) -> Iterator[None]:
    """In the context, rank 0 comes to wait for the team, and then the rank is killed."""
    pid = ranks.processes[rank - 1]
    os.kill(pid, signal.SIGSTOP)

    def kill() -> None:
        until(lambda: sleeps(ranks, degree))
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    yield
    killer.join()


def kill(ranks: Ranks, rank: int) -> None:
    before = ranks.degrees
    os.kill(ranks.processes[rank - 1], signal.SIGKILL)
    until(lambda: ranks.degrees != before)


def regroup(engine: TorchEngine) -> None:
    for _ in engine.regroup():
        pass


def test_a_rank_that_is_killed_in_the_rehearsal(choosing: Callable[..., Chosen]) -> None:
    def killing(ranks: Ranks, *args: Any) -> Any:
        with killed_while_waited_for(ranks, 1, 2):
            return measure(ranks, *args)

    made = choosing((2,), killing)
    assert not made.ranks.processes
    model = make_model()
    made.hold(MODEL, model)
    said = made.engine.division(MODEL)
    assert re.match(r"1 process runs it: no others .*rank 1 .* ended with signal 9", said)
    assert made.generate({MODEL: model})[MODEL] == model.expected_tokens(PROMPT, COUNT)


def test_a_rehearsal_goes_on_with_the_teams_that_are_left(choosing: Callable[..., Chosen]) -> None:
    def killing(ranks: Ranks, *args: Any) -> Any:
        with killed_while_waited_for(ranks, 3, 4):
            return measure(ranks, *args)

    made = choosing((2, 4), killing)
    assert len(made.ranks.processes) == 1
    model = make_model(**FOUR_KV_HEADS)
    made.hold(MODEL, model)
    said = made.engine.division(MODEL)
    assert re.search(r" it: .* ms with 1, .* ms with 2; there were more before its rank 3", said)
    assert made.generate({MODEL: model})[MODEL] == model.expected_tokens(PROMPT, COUNT)


def test_a_rehearsal_to_which_a_rank_does_not_come(choosing: Callable[..., Chosen]) -> None:
    def stopping(ranks: Ranks, *args: Any) -> Any:
        os.kill(ranks.processes[0], signal.SIGSTOP)
        return measure(ranks, *args, give_up_s=0.5)

    made = choosing((2,), stopping)
    assert "did not end their rehearsal" in made.ranks.loss
    model = make_model()
    made.hold(MODEL, model)
    assert made.generate({MODEL: model})[MODEL] == model.expected_tokens(PROMPT, COUNT)


def test_a_rank_that_ends_before_it_is_there(
    choosing: Callable[..., Chosen], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Ranks._start

    def starting(self: Ranks, *args: Any) -> None:
        start(self, *args)
        os.kill(self.processes[-1], signal.SIGKILL)

    monkeypatch.setattr(Ranks, "_start", starting)
    made = choosing((2,), measure)
    model = make_model()
    made.hold(MODEL, model)
    assert made.generate({MODEL: model})[MODEL] == model.expected_tokens(PROMPT, COUNT)


def test_a_sequence_goes_on_after_its_team_was_lost(choosing: Callable[..., Chosen]) -> None:
    """Its KV stays, since it lies in memory that all ranks share."""
    told: list[bool] = []
    made = choosing((2,), costs(TWO))
    made.ranks.on_loss = lambda: told.append(True)
    model = make_model()
    made.hold(MODEL, model)
    tokens: list[int] = []
    for step in range(6):
        given, at = (PROMPT, 0) if not step else (tokens[-1:], len(PROMPT) + step - 1)
        if step == 3:
            kill(made.ranks, 1)
            until(lambda: bool(told))
            regroup(made.engine)
            assert made.engine.held(MODEL) == frozenset(range(model.n_blocks))
        one = part([row("s", at, given, draw=step)], 0, model.n_blocks)
        tokens += run(made.engine, one).sampled[0]
    assert tokens == model.expected_tokens(PROMPT, 6)
    assert "1 process runs it: no others are left" in made.engine.division(MODEL)


def test_a_step_in_which_a_rank_is_killed_fails(choosing: Callable[..., Chosen]) -> None:
    made = choosing((2, 4), costs(FOUR))
    model = make_model(**FOUR_KV_HEADS)
    made.hold(MODEL, model)
    first = part([row("first", 0, PROMPT, draw=0)], 0, model.n_blocks)
    with killed_while_waited_for(made.ranks, 3, 4), pytest.raises(EngineFailed, match="signal 9"):
        run(made.engine, first)
    made.engine.free(("first",))
    regroup(made.engine)
    assert made.engine.division(MODEL).startswith("2 processes run it")
    assert made.generate({MODEL: model})[MODEL] == model.expected_tokens(PROMPT, COUNT)


def test_only_teams_that_the_rank_was_in_are_lost(choosing: Callable[..., Chosen]) -> None:
    made = choosing((2, 4), costs(FOUR))
    names = [ModelId(name) for name in ("four", "two", "one")]
    changes: list[dict[str, Any]] = [FOUR_KV_HEADS, {}, {"num_key_value_heads": 1}]
    models = {
        name: make_model(seed=i, **each)
        for i, (name, each) in enumerate(zip(names, changes, strict=True))
    }
    for name, model in models.items():
        made.hold(name, model)
    expected = {name: model.expected_tokens(PROMPT, COUNT) for name, model in models.items()}

    def processes() -> list[str]:
        return [made.engine.division(name)[0] for name in names]

    assert processes() == ["4", "2", "1"]
    kill(made.ranks, 2)
    regroup(made.engine)
    assert processes() == ["2", "2", "1"]
    assert len(made.ranks.processes) == 1
    assert made.generate(models) == expected
    made.engine.close_model(names[1], asleep=True)
    kill(made.ranks, 1)
    regroup(made.engine)
    assert not made.ranks.processes
    made.hold(names[1], models[names[1]])
    assert processes() == ["1", "1", "1"]
    assert made.generate(models) == expected


def test_a_team_is_lost_while_blocks_come(choosing: Callable[..., Chosen]) -> None:
    made = choosing((2,), costs(TWO))
    model = make_model()
    buffers, model.buffers = model.buffers, model.buffers[:2]
    made.hold(MODEL, model)
    kill(made.ranks, 1)
    for block, buffer in enumerate(buffers[2:], start=2):
        memory = made._arena.allocate(len(buffer)).memory
        memory[:] = buffer
        made.engine.attach(MODEL, block, memory)
    # The first one is attached when the loss is seen: rows begin with it, and wait for the others.
    assert made.engine.held(MODEL) == frozenset(range(model.n_blocks)) - {1}
    regroup(made.engine)
    assert made.engine.held(MODEL) == frozenset(range(model.n_blocks))
    assert made.generate({MODEL: model})[MODEL] == model.expected_tokens(PROMPT, COUNT)


def test_adapters_of_a_team_that_is_lost(tmp_path: Folder, choosing: Callable[..., Chosen]) -> None:
    """One is there, and another is made while the team is lost."""
    made = choosing((2,), costs(TWO))
    model, specs = make_model(seed=3), [SPECS[name] for name in ("all", "q_and_v")]
    made.hold(MODEL, model)
    adapted = Adapted(tmp_path, model)
    there = adapted.add(made.engine, specs[0])
    make = made.engine.make_adapter

    def losing(manifest: Manifest) -> Callable[[], MakeAdapter]:
        maker = make(manifest)()

        def made_late(weights: memoryview) -> Any:
            adapter = maker(weights)
            made.engine.make_adapter = make  # type: ignore[method-assign]
            kill(made.ranks, 1)
            regroup(made.engine)
            return adapter

        return lambda: made_late

    made.engine.make_adapter = losing  # type: ignore[method-assign]
    came = adapted.add(made.engine, specs[1])
    for name, spec in zip((there, came), specs, strict=True):
        given = with_adapter(row("adapted", 0, PROMPT, draw=0), name)
        ((token,),) = run(made.engine, part([given], 0, model.n_blocks)).sampled
        made.engine.free(("adapted",))
        assert [token] == adapted.oracle(spec).expected_tokens(PROMPT, 1)
