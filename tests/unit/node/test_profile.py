import pytest

from services.node.core.profile import (
    MODELS,
    SAMPLES,
    SHORTEST_S,
    EngineTimes,
    Profiler,
    Throughput,
)
from shared.ids import ModelId
from shared.messages.pool import ModelProfile, Profile

MODEL = ModelId("m")


def test_nothing_measured_is_nothing_said() -> None:
    assert Profiler().profile() == Profile()


def test_a_profile_of_everything_in_two_digits() -> None:
    profiler = Profiler()
    profiler.pulled(0.0, 0.0012345, 1.0012345, 123_456_789)
    profiler.sent(5.0, 6.0, 98_765_432)
    profiler.loaded(7.0, 9.0, 222_222_222)
    profiler.ran(MODEL, 0.5, 1, 0.01)
    profiler.ran(MODEL, 0.5, 101, 0.015)
    assert profiler.profile() == Profile(
        in_bytes_per_s=1.2e8,
        out_bytes_per_s=9.9e7,
        overhead_s=0.0012,
        load_bytes_per_s=1.1e8,
        models=(
            ModelProfile(model_id=MODEL, decode_s=0.02, prefill_s_per_token=0.0001, share=0.5),
        ),
    )


def test_noise_is_no_news() -> None:
    def profile(factor: float) -> Profile:
        profiler = Profiler()
        profiler.pulled(0.0, 0.001, 0.001 + factor, 120_000_000)
        return profiler.profile()

    assert profile(1.001) == profile(0.999)


def test_a_relay_that_waits_for_its_source_is_not_slow() -> None:
    profiler = Profiler()
    profiler.pulled(0.0, 0.001, 1.001, 100_000_000)
    profiler.pulled(10.0, 13.0, 23.0, 100_000_000)
    profile = profiler.profile()
    assert (profile.in_bytes_per_s, profile.overhead_s) == (1e8, 0.001)


def test_blocks_that_share_the_port_count_together() -> None:
    port = Throughput()
    port.add(0.0, 1.9, 100)
    port.add(0.1, 2.0, 100)
    assert port.bytes_per_s == 100


def test_a_long_transfer_stretches_the_period_back_to_where_it_began() -> None:
    port = Throughput()
    port.add(8.0, 9.0, 10)
    port.add(0.0, 10.0, 190)
    assert port.bytes_per_s == 20


def test_what_is_shorter_than_a_buffer_takes_says_nothing() -> None:
    port = Throughput()
    port.add(0.0, SHORTEST_S / 2, 1 << 20)
    assert port.bytes_per_s == 0
    port.add(5.0, 5.0, 1 << 20)  # the clock stood, or was set back
    port.add(6.0, 5.0, 1 << 20)
    assert port.bytes_per_s == 0


def test_a_rate_of_long_ago_is_forgotten() -> None:
    port = Throughput()
    for at in range(20):
        port.add(at, at + 0.5, 500 if at < 2 else 50)
    assert port.bytes_per_s == 100


def test_passes_of_one_size_are_decode_steps() -> None:
    times = EngineTimes()
    for seconds in (0.02, 0.03, 0.5):
        times.add(4, seconds)
    assert times.line() == (0.03, 0.0)


def test_passes_of_about_the_same_size_tell_nothing_about_smaller_passes() -> None:
    """Noise between 40 and 52 tokens would make a pass of one token seem to take 9 ms."""
    times = EngineTimes()
    times.add(40, 0.060)
    times.add(52, 0.075)
    one, more = times.line()
    assert one >= 0.060
    assert more == 0.0


def test_a_pass_of_one_token_takes_no_less_than_the_line_says_of_the_smallest() -> None:
    """The passes of a node that has only computed prompts: few tokens are bound by the weights."""
    times = EngineTimes()
    times.add(60, 0.065)
    times.add(120, 0.101)
    assert times.line() == pytest.approx((0.065, 0.0006))
    times = EngineTimes()
    times.add(4, 0.060)
    times.add(120, 0.101)
    one, _ = times.line()
    assert one == pytest.approx(0.060, abs=0.002)


def test_far_apart_sizes_tell_more_than_near_ones() -> None:
    """Decode steps of a few tokens differ by noise alone."""
    times = EngineTimes()
    for tokens in range(2, 8):
        times.add(tokens, 0.02 + 0.01 * (tokens % 2 == 0))
    times.add(1001, 1.02)
    one, more = times.line()
    assert one == pytest.approx(0.025, abs=0.006)
    assert more == pytest.approx(0.001, rel=0.02)


def test_many_small_passes_do_not_drive_out_the_large() -> None:
    times = EngineTimes()
    times.add(1001, 1.02)
    for _ in range(10 * SAMPLES):
        times.add(1, 0.02)
    assert times.line() == (0.02, 0.001)


def test_models_that_ran_longest_ago_are_left_out() -> None:
    profiler = Profiler()
    for number in range(MODELS):
        profiler.ran(ModelId(f"m{number}"), 1.0, 1, 0.1)
    profiler.ran(ModelId("m0"), 1.0, 1, 0.1)
    profiler.ran(ModelId("new"), 1.0, 1, 0.1)
    told = [each.model_id for each in profiler.profile().models]
    assert told == ["m0", *(f"m{number}" for number in range(2, MODELS)), "new"]


def test_passes_over_a_small_part_of_the_model_do_not_make_the_node_look_slow() -> None:
    """Each pass has 10 ms of fixed costs, whatever its part of the model."""
    profiler = Profiler()
    for share in (0.1, 0.5, 1.0, 0.9, 0.1):
        for tokens in (1, 101):
            profiler.ran(MODEL, share, tokens, 0.01 + share * (0.01 + 0.0001 * tokens))
    (times,) = profiler.profile().models
    assert times.decode_s <= 0.021


def test_a_pass_of_few_tokens_is_not_taken_from_the_line_through_large_ones() -> None:
    """Passes take as long as reading the weights, until their tokens take longer."""
    times = EngineTimes()
    for tokens in (6, 42, 41, 232, 156, 314, 80):
        times.add(tokens, max(0.06, 0.0008 * tokens))
    one, _ = times.line()
    assert one == pytest.approx(0.06, rel=0.1)


def test_what_a_further_sequence_adds_is_told_by_decode_steps_alone() -> None:
    """Reading its KV takes longer than a further token of a prompt."""
    times = EngineTimes()
    for tokens in (1, 2, 4, 7, 12, 20, 40):
        times.add(tokens, 0.010 + (tokens - 1) * 0.0005)
    for tokens in (512, 1024, 2048):
        times.add(tokens, 0.010 + tokens * 0.00005)
    assert times.decode_s_per_token() == pytest.approx(0.0005)
    assert EngineTimes().decode_s_per_token() == 0.0
    one_size = EngineTimes()
    one_size.add(8, 0.02)
    one_size.add(8, 0.03)
    assert one_size.decode_s_per_token() == 0.0
