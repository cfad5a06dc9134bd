"""What a burst waits for, in virtual time: the bars of the benchmark, in its small scenario."""

from benchmarks.burst import BAR_DECISION_S, demo, serve


def test_the_demos_burst_meets_its_bars() -> None:
    scenario = demo()
    found = serve(scenario, "pools")
    for ttft, bar in zip(found.ttft, scenario.bars, strict=True):
        assert ttft <= bar
    assert found.decision_s <= BAR_DECISION_S
    assert found.events == 1
