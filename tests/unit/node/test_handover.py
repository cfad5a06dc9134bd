"""When KV is copied from another node, and who gets it."""

import pytest

from services.node.core.handover import ASKING_S, COPIED_BYTES_PER_S, is_worth, secret_of
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
    assert is_worth(measured, link, MODEL, 1000, 100 * MB) is worth, what


def test_the_costs_of_copying_count_without_a_link_too() -> None:
    nbytes = 100 * MB
    copy_s = ASKING_S + nbytes / COPIED_BYTES_PER_S
    assert is_worth(profile(1.01 * copy_s / 1000), 0, MODEL, 1000, nbytes)
    assert not is_worth(profile(0.99 * copy_s / 1000), 0, MODEL, 1000, nbytes)


def test_a_secret_is_known_to_who_knows_request_and_prompt() -> None:
    one = secret_of(submit("r", ALONE, prompt=(5, 6)))
    assert one == secret_of(submit("r", ALONE, attempt=2, prompt=(5, 6), so_far=(7,)))
    assert one != secret_of(submit("other", ALONE, prompt=(5, 6)))
    assert one != secret_of(submit("r", ALONE, prompt=(5, 7)))
