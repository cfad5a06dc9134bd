"""When KV is copied from another node, and who gets it."""

import pytest

from services.node.core.handover import (
    ASKING_S,
    COPIED_BYTES_PER_S,
    MEASURED_BYTES,
    KvWorth,
    is_worth,
    secret_of,
)
from services.node.core.kv_host import AGAIN, FEW
from shared.ids import ModelId
from shared.messages.pool import ModelProfile, Profile
from tests.support.submits import BLOCKS, stages, submit

MODEL = ModelId("m")
ALONE = stages(("a", 0, BLOCKS))
MB = 1_000_000


def profile(prefill_s_per_token: float = 0.0, in_bytes_per_s: float = 0.0) -> Profile:
    model = ModelProfile(model_id=MODEL, prefill_s_per_token=prefill_s_per_token)
    return Profile(in_bytes_per_s=in_bytes_per_s, models=(model,))


@pytest.mark.parametrize(
    ("what", "measured", "link", "worth"),
    [
        ("slow engine, fast link", profile(0.001, 1000 * MB), 0, True),
        ("fast engine, slow link", profile(0.00001, 10 * MB), 0, False),
        ("the link's own limit counts", profile(0.0001, 1000 * MB), 10 * MB, False),
        ("an engine that was not measured", profile(0.0, 10 * MB), 0, True),
        ("a link that was not measured", profile(0.001), 0, True),
        ("another model", Profile(), 0, True),
    ],
)
def test_kv_is_copied_if_that_is_faster_than_to_compute_it(
    what: str, measured: Profile, link: int, worth: bool
) -> None:
    assert is_worth(measured, link, COPIED_BYTES_PER_S, MODEL, 1000, 100 * MB) is worth, what


def test_the_costs_of_copying_count_without_a_link_too() -> None:
    nbytes = 100 * MB
    copy_s = ASKING_S + 2 * nbytes / COPIED_BYTES_PER_S
    alike = 0, COPIED_BYTES_PER_S, MODEL, 1000, nbytes
    assert is_worth(profile(1.01 * copy_s / 1000), *alike)
    assert not is_worth(profile(0.99 * copy_s / 1000), *alike)


def refused_in_a_row(worth: KvWorth, measured: Profile, nbytes: int) -> int:
    """How often it is not worth it before it is."""
    return next(n for n in range(10 * AGAIN) if worth.worth(measured, MODEL, 1000, nbytes))


def test_kv_is_copied_by_the_rate_of_the_nodes_own_copies() -> None:
    nbytes, fast = 100 * MB, profile(0.00008)  # 80 ms to compute
    worth = KvWorth(0)
    for _ in range(FEW):
        assert worth.worth(fast, MODEL, 1000, nbytes), "its rate is not known yet"
        worth.copied(nbytes, 0.5)
    assert worth.seconds(fast, nbytes) == pytest.approx(2 * 0.5)
    assert not worth.worth(fast, MODEL, 1000, nbytes)
    for _ in range(FEW + 1):
        worth.copied(nbytes, 0.02)
    assert worth.seconds(fast, nbytes) == pytest.approx(2 * 0.02)
    assert refused_in_a_row(worth, fast, nbytes) == 0


def test_what_was_too_slow_is_tried_again_where_a_trial_is_short() -> None:
    nbytes, fast = 10 * MB, profile(0.000012)
    worth = KvWorth(0)
    for _ in range(FEW):
        worth.worth(fast, MODEL, 1000, nbytes)
        worth.copied(nbytes, 0.01)
    for trial in range(FEW):
        refused = refused_in_a_row(worth, fast, nbytes)
        assert refused == (0 if trial else AGAIN - 1)
    assert refused_in_a_row(worth, fast, nbytes) == AGAIN - 1
    for _ in range(FEW):
        worth.copied(nbytes, 1.0)
    slow = KvWorth(0)
    for _ in range(FEW):
        slow.copied(nbytes, 1.0)
    assert not any(slow.worth(fast, MODEL, 1000, nbytes) for _ in range(2 * AGAIN)), "2 s each"


def test_nothing_is_tried_where_copies_are_not_what_is_slow() -> None:
    worth = KvWorth(10 * MB)
    assert not worth.worth(profile(0.00001), MODEL, 1000, MB)
    assert not KvWorth(0).worth(profile(0.000001), MODEL, 1000, MB), "to ask takes longer"


def test_small_copies_say_nothing_of_the_rate() -> None:
    worth = KvWorth(0)
    for _ in range(FEW):
        worth.copied(MEASURED_BYTES - 1, 1.0)
    assert worth.seconds(Profile(), 100 * MB) == 200 * MB / COPIED_BYTES_PER_S


def test_a_secret_is_known_to_who_knows_request_and_prompt() -> None:
    one = secret_of(submit("r", ALONE, prompt=(5, 6)))
    assert one == secret_of(submit("r", ALONE, attempt=2, prompt=(5, 6), so_far=(7,)))
    assert one != secret_of(submit("other", ALONE, prompt=(5, 6)))
    assert one != secret_of(submit("r", ALONE, prompt=(5, 7)))
