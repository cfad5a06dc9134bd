"""Each kind of fault alone, at the worst moment: it happens, and what must hold holds."""

import re
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from simulation import systems
from simulation.chaos import play
from simulation.cluster import GATEWAY, PLANNER, REGISTRY, ClusterSpec
from simulation.faults import (
    Absence,
    BusCut,
    ClockJump,
    Corrupt,
    Crash,
    Drain,
    Fault,
    Jitter,
    Leaderless,
    Leave,
    Loss,
    Outage,
    Pause,
    PeerCut,
    Reclaim,
    Restart,
    Role,
    SlowLink,
    StoreCut,
    Vanish,
    Whom,
)
from simulation.hardware import hardware
from simulation.models import model
from simulation.scenario import Arrival, Scenario
from tests.support.amounts import cases

SPEC = ClusterSpec(
    system=systems.named("lambdascale"),
    hardware=msgspec.structs.replace(hardware("paced-laptop"), ssd_bytes_per_s=2e7),
    models=(model("demo", "model"),),
    nodes=5,
    blocks=4,
    chunks=4,
    slots=4,
    anticipate=False,  # then copies that are not needed are known to leave memory
)
TOKENS = 20
BURST = tuple(Arrival(1 + 0.02 * number, "model", 20, TOKENS) for number in range(36))
"""Takes all nodes: the event begins some 0.3 s after it, and takes a good 5 s."""
LOADING_S = 3.0


def node(number: int) -> Whom:
    return Whom(None, f"node-{number}")


def whoever(role: Role) -> Whom:
    return Whom(role, "node-0")


def log_of(
    *faults: Fault, spec: ClusterSpec = SPEC, requests: Sequence[Arrival] = BURST
) -> list[str]:
    """The log of a run, in which no invariant may be violated."""
    verdict = play(Scenario(0, spec, tuple(requests), faults))
    assert not verdict.violations
    return [line.split(maxsplit=1)[1] for line in verdict.log]


def count(log: Sequence[str], pattern: str) -> int:
    return sum(re.search(pattern, line) is not None for line in log)


def test_without_faults_one_event_takes_every_node() -> None:
    log = log_of()
    assert count(log, "is complete, revision") == 2  # the first replica's, and this one
    assert count(log, "VIOLATED") == 0
    assert count(log, f"ended, {TOKENS} tokens$") == len(BURST)
    assert log.count("at rest") == 1


@pytest.mark.parametrize(
    "role",
    cases([Role.SOURCE, Role.RELAY, Role.LEADER], thorough=[Role.TARGET, Role.REPLICA]),
    ids=lambda r: r.name,
)
def test_a_node_dies_while_others_load(role: Role) -> None:
    log = log_of(Crash(at=LOADING_S, lasts=6, whom=whoever(role)))
    (dead,) = [line.split()[0] for line in log if line.endswith(" dead") and "over" not in line]
    assert count(log, f"^{dead} gone as .* expired") == 1
    assert count(log, f"^{dead} joined as [0-9]+$") == 2
    assert count(log, r"revision [1-9].* targets .*node|is failed") >= 1, "planned again"


def test_all_that_loads_dies() -> None:
    log = log_of(*(Crash(at=LOADING_S, lasts=8, whom=whoever(Role.TARGET)) for _ in range(3)))
    assert count(log, "^node-[0-9] dead") == 3


def test_half_of_the_nodes_die_at_once() -> None:
    log = log_of(Vanish(at=LOADING_S, lasts=8), spec=replace(SPEC, nodes=6))
    assert count(log, "^(node-[0-9], ){2}node-[0-9] dead, all at once") == 1
    assert count(log, "gone as .* expired") == 3
    assert count(log, f"^req-.* ended, {TOKENS} tokens$") == len(BURST)


@pytest.mark.parametrize("notice_s", [30.0, 0.1])
def test_half_of_the_nodes_are_taken_away_after_a_notice(notice_s: float) -> None:
    log = log_of(Reclaim(at=LOADING_S, lasts=8, notice_s=notice_s), spec=replace(SPEC, nodes=6))
    assert count(log, "^(node-[0-9], ){2}node-[0-9] taken away within") == 1
    assert count(log, "gone as .* gave its lease back") == 3 + 6, "those three, and all at the end"
    assert count(log, "its time was over|expired") == 0
    assert count(log, f"^req-.* ended, {TOKENS} tokens$") == len(BURST)


@pytest.mark.parametrize(
    ("role", "limit_s"),
    cases(
        [(Role.TARGET, 0.0), (Role.RELAY, 1.0), (Role.REPLICA, 0.0)],
        thorough=[(Role.TARGET, 1.0), (Role.RELAY, 0.0), (Role.REPLICA, 1.0)],
    ),
)
def test_a_node_is_drained_while_others_load(role: Role, limit_s: float) -> None:
    log = log_of(Drain(at=LOADING_S, lasts=20, whom=whoever(role), limit_s=limit_s))
    (node,) = [line.split()[0] for line in log if re.match("node-[0-9] drained", line)]
    assert count(log, f"^{node} joined as [0-9]+, draining$") == 1
    emptied = next(
        i for i, line in enumerate(log) if f"{node} joined as" in line and "drain" in line
    )
    served = [line for line in log[emptied:] if "model is served by" in line]
    until = next(i for i, line in enumerate(served) if f"{node}[" not in line)
    assert until < len(served), "it serves no more"
    assert count(log, f"^req-.* ended, {TOKENS} tokens$") == len(BURST)


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
def test_clients_of_a_gateway_that_ends_come_again_to_another(killed: bool) -> None:
    log = log_of(
        Restart(at=2, lasts=3, role=GATEWAY, killed=killed), spec=replace(SPEC, gateways=2)
    )
    assert count(log, f"^req-[0-9]+[.]2 ended, {TOKENS} tokens$") >= (killed and 1)
    assert count(log, f"^req-.* ended, {TOKENS} tokens$") == len(BURST)


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "cut off"])
def test_a_gateway_that_was_away_for_longer_than_its_lease_goes_on(stopped: bool) -> None:
    log = log_of(
        Absence(at=2, lasts=15, role=GATEWAY, stopped=stopped), spec=replace(SPEC, gateways=2)
    )
    assert count(log, "^gateway goes on$") == 1
    assert count(log, f"^req-.* ended, {TOKENS} tokens$") == len(BURST)


def test_a_store_without_a_leader_ends_no_event() -> None:
    log = log_of(Leaderless(at=LOADING_S, lasts=7))
    assert count(log, "lease not renewed") >= 1
    assert count(log, "gone as") == 0
    assert count(log, "is complete, revision") == 2


@pytest.mark.parametrize("role", [PLANNER, REGISTRY])
def test_who_alone_does_not_reach_the_store_says_nothing_once_its_standby_is_active(
    role: str,
) -> None:
    """Whoever has not heard of the standby would obey both."""
    cut = StoreCut(at=LOADING_S, lasts=9, role=role)
    log = log_of(cut, spec=replace(SPEC, standbys=1))
    assert count(log, f"^{role}.* reaches the store; 0 messages were refused$") == 1
    assert count(log, f"{role} info: active term=") == 2
    assert count(log, "expired") == 0
    assert count(log, f"^req-.* ended, {TOKENS} tokens$") == len(BURST)


@pytest.mark.parametrize("by_s", cases([-86400.0], thorough=[86400.0]))
def test_clocks_a_day_apart(by_s: float) -> None:
    processes = PLANNER, REGISTRY, GATEWAY, "node-0"
    log = log_of(
        *(ClockJump(at=0.5 + i, lasts=0, process=p, by_s=by_s) for i, p in enumerate(processes)),
        spec=replace(SPEC, standbys=1),
    )
    assert count(log, "is complete, revision") == 2


def test_a_node_leaves_in_good_order() -> None:
    log = log_of(Leave(at=LOADING_S, lasts=2, whom=whoever(Role.RELAY)))
    assert count(log, "gone as .* gave its lease back") >= 1
    assert count(log, "expired") == 0


def test_a_short_stop_of_a_node_is_no_death() -> None:
    log = log_of(Pause(at=LOADING_S, lasts=0.4, whom=whoever(Role.RELAY)))
    assert count(log, "^node-[0-9] paused") == 1
    assert count(log, "expired") == 0


def test_a_node_that_was_stopped_for_long_goes_on_as_another() -> None:
    log = log_of(Pause(at=LOADING_S, lasts=8, whom=whoever(Role.RELAY)))
    (paused,) = {line.split()[0] for line in log if line.endswith(" paused") and "over" not in line}
    assert count(log, f"^{paused} gone as .* expired") == 1
    assert count(log, f"^{paused} joined as [0-9]+$") == 2


def test_a_node_parted_from_the_bus_goes_on_loading_and_is_taken_back() -> None:
    log = log_of(BusCut(at=LOADING_S, lasts=9, whom=whoever(Role.TARGET)))
    assert count(log, "gone as .* expired") == 1


def test_two_nodes_that_do_not_reach_each_other() -> None:
    log = log_of(PeerCut(at=LOADING_S, lasts=10, whom=whoever(Role.RELAY), other="node-0"))
    assert count(log, "got no block .* silent") + count(log, "got no block .* no connection") >= 1


def test_a_slow_link() -> None:
    log = log_of(SlowLink(at=LOADING_S, lasts=20, whom=whoever(Role.RELAY), share=0.01))
    assert count(log, "at 1% of its rate") == 2
    assert count(log, "is complete, revision") >= 1


@pytest.mark.parametrize(("reads", "failures"), [(3, 0), (40, 1)])
def test_wrong_bytes_are_fetched_again(reads: int, failures: int) -> None:
    """From the same node at first, elsewhere if that does not help."""
    log = log_of(Corrupt(at=LOADING_S, lasts=0, whom=whoever(Role.SOURCE), reads=reads))
    assert (count(log, "got no block .*read twice") > 0) == failures
    assert count(log, "is complete, revision") >= 2


def test_the_bus_is_away_while_nodes_load() -> None:
    log = log_of(Outage(at=LOADING_S, lasts=4))
    assert count(log, "expired") == 0
    assert count(log, "is complete, revision") == 2, "the event outlives it"


def test_messages_are_lost() -> None:
    log = log_of(Loss(at=0, lasts=15, share=0.02))
    assert count(log, "loses 2.0%") == 1


def test_messages_come_in_another_order() -> None:
    log = log_of(Jitter(at=0, lasts=15, up_to_s=0.1))
    assert count(log, "is complete, revision") >= 1


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
def test_another_planner_takes_over_what_loads(killed: bool) -> None:
    log = log_of(Restart(at=LOADING_S, lasts=1, role=PLANNER, killed=killed))
    assert count(log, "planner back") == 1
    assert count(log, "is complete, revision") >= 2


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
def test_another_registry_knows_what_this_one_knew(killed: bool) -> None:
    log = log_of(Restart(at=LOADING_S, lasts=3, role=REGISTRY, killed=killed))
    assert count(log, "registry back") == 1
    assert count(log, "is complete, revision") == 2
    assert count(log, "expired") == 0


def test_a_node_comes_back_to_a_registry_that_never_knew_it_gone() -> None:
    """It goes on as the generation that was over, as nobody tells it; the planner must agree."""
    log = log_of(
        BusCut(at=1, lasts=14, whom=node(4)),
        Restart(at=8, lasts=1, role=REGISTRY, killed=True),
        requests=[replace(each, at=each.at + 20) for each in BURST],
    )
    (gone,) = {line.split()[3] for line in log if line.startswith("node-4 gone")}
    (back, *_) = [line.split()[3] for line in log if line.startswith("node-4 joined")][1:]
    assert gone.rstrip(":") == back
    assert count(log, "is transferring.* targets .*node-4") >= 1, "it takes part again"


def test_clients_that_hang_up_leave_nothing_behind() -> None:
    log = log_of(requests=[replace(each, leaves_after=0.1 * i) for i, each in enumerate(BURST)])
    assert count(log, "ended, .* cancelled") > len(BURST) / 2


@pytest.mark.parametrize(
    "system", cases(["blitzscale", "nccl"], thorough=["lambdapipe", "faasnet", "serverlessllm"])
)
def test_other_systems_survive_too(system: str) -> None:
    spec = replace(SPEC, system=systems.named(system))
    log_of(
        Crash(at=LOADING_S, lasts=4, whom=whoever(Role.TARGET)),
        Crash(at=LOADING_S + 1, lasts=4, whom=whoever(Role.REPLICA)),
        spec=spec,
    )


@pytest.mark.parametrize(
    ("load", "kills_at"), cases([(1, 0), (10, 7), (30, 7)], thorough=[(1, 7), (10, 0), (30, 0)])
)
def test_a_request_that_kills_its_node_is_tried_once_more_and_refused(
    load: int, kills_at: int
) -> None:
    """And nothing else is lost: `play` checks the other requests."""
    poison = replace(BURST[load // 2], kills_at=kills_at)
    requests = (*BURST[: load // 2], poison, *BURST[load // 2 + 1 : load])
    log = log_of(requests=requests)
    assert count(log, "^node-[0-9] dead, killed by req-") == 2
    assert count(log, "^req-[0-9]+ ended, .* request_kills_nodes") == 1
    assert count(log, f"ended, {TOKENS} tokens$") == len(requests) - 1


def test_requests_that_kill_their_nodes_one_after_the_other() -> None:
    longer = [replace(each, output_tokens=30) for each in BURST]
    requests = [replace(each, kills_at=3) if n in (4, 7) else each for n, each in enumerate(longer)]
    log = log_of(requests=requests[:12])
    assert count(log, "^req-[0-9]+ ended, .* request_kills_nodes") == 2
    assert count(log, "ended, 30 tokens$") == 10
