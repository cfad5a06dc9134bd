"""What the planner knows: live nodes only, by their newest word; loads of gateways that speak."""

import msgspec

from services.planner.core.cluster import DISK_BYTES_PER_S, Cluster
from shared.ids import Generation, InstanceId, ModelName, NodeId
from shared.messages.pool import Duty, Holding, ModelProfile, Profile, Tier
from tests.unit.planner.records import arrival
from tests.unit.registry.builders import MODEL, OTHER, holding, info, record, status

A, B = NodeId("a"), NodeId("b")
LLAMA = ModelName("llama")
ON = InstanceId("replica-a")
GPU = [Tier.GPU]


def cluster(*holdings: Holding, generation: int = 1) -> Cluster:
    found = Cluster()
    found.on_joined(info("a", generation))
    found.on_status(status("a", *holdings, generation=generation), now=0.0)
    return found


def test_blocks_by_model_and_tier() -> None:
    found = cluster(
        holding(Tier.GPU, 0, 1), holding(Tier.HOST, 2), holding(Tier.GPU, 3, model_id=OTHER)
    )
    assert found.held(A, MODEL, GPU) == {0, 1}
    assert found.held(A, MODEL, [Tier.GPU, Tier.HOST]) == {0, 1, 2}
    assert found.holders(MODEL, GPU) == {A: {0, 1}}
    assert found.holders(MODEL, [Tier.DISK]) == {}
    assert {h.model_id for _, h in found.in_arenas({})} == {MODEL, OTHER}
    assert {h.model_id for _, h in found.in_arenas({MODEL: {A}, OTHER: {B}})} == {OTHER}


def test_memory_set_aside_counts_before_the_first_block() -> None:
    found = cluster(holding(Tier.GPU))
    assert found.hosts(A, MODEL)
    assert not found.hosts(A, OTHER)
    assert found.holders(MODEL, GPU) == {}


def test_memory_set_aside_is_no_change_but_its_end_is() -> None:
    found = cluster()
    aside = status("a", holding(Tier.GPU), seq=2)
    change = found.on_status(aside, 0.0)
    assert change.models == {MODEL}
    assert change.changed == set()
    filled = msgspec.structs.replace(aside, seq=3, holdings=(holding(Tier.GPU, 0),))
    assert found.on_status(filled, 0.0).gained == {MODEL: {0}}
    emptied = msgspec.structs.replace(aside, seq=4)
    assert found.on_status(emptied, 0.0).changed == {MODEL}
    gone = msgspec.structs.replace(aside, seq=5, holdings=())
    assert found.on_status(gone, 0.0).changed == {MODEL}
    found.validate()


def test_holders_follow_the_reports() -> None:
    found = cluster(holding(Tier.GPU, 0), holding(Tier.DISK, 1, model_id=OTHER))
    found.on_joined(info("0"))
    found.on_status(status("0", holding(Tier.GPU, 1)), now=0.0)
    assert list(found.holders(MODEL, GPU)) == ["0", "a"]
    assert found.models_on(A) == [MODEL]
    found.on_status(status("a", holding(Tier.DISK, 1, model_id=OTHER), seq=2), now=1.0)
    assert list(found.holders(MODEL, GPU)) == ["0"]
    assert found.models_on(A) == []
    assert found.holders(OTHER, [Tier.DISK]) == {A: {1}}
    found.on_gone(A, Generation(1), 0.0)
    assert found.holders(OTHER, [Tier.DISK]) == {}


def test_what_a_node_measured_is_its_last_word_of_it() -> None:
    found = cluster(holding(Tier.GPU, 0))
    assert found.profile(A) == Profile()
    ran = ModelProfile(model_id=MODEL, prefill_s_per_token=0.001, decode_s=0.02)
    fast = Profile(in_bytes_per_s=1e9, models=(ran,))
    assert (found.measured.decode_s(MODEL), found.measured.prefill_s_per_token(MODEL)) == (0.0, 0.0)
    said = status("a", holding(Tier.GPU, 0), seq=2)
    found.on_status(msgspec.structs.replace(said, profile=fast), now=1.0)
    assert found.profile(A) == fast
    assert (found.measured.decode_s(MODEL), found.measured.prefill_s_per_token(MODEL)) == (
        0.02,
        0.001,
    )
    found.on_joined(info("a", generation=2))
    assert found.profile(A) == Profile()


def test_slots_are_those_of_the_node_in_the_middle() -> None:
    found = Cluster()
    assert found.slots == 1
    found.on_joined(info("a"))
    assert found.slots == 4
    found.on_joined(msgspec.structs.replace(info("b"), slots=9))
    assert found.slots == 4
    found.on_joined(msgspec.structs.replace(info("c"), slots=9))
    assert found.slots == 9
    found.on_gone(NodeId("c"), Generation(1), 0.0)
    found.on_gone(NodeId("b"), Generation(1), 0.0)
    assert found.slots == 4


def test_a_node_with_the_model_open_says_how_much_kv_a_replica_has() -> None:
    found = Cluster()
    found.on_joined(info("a"))
    assert found.measured.kv_tokens(MODEL) == 0
    found.on_status(status("a", holding(Tier.HOST, 0)), 0.0)
    opened = status("a", holding(Tier.GPU, 0), seq=2)
    found.on_status(msgspec.structs.replace(opened, kv_shares={MODEL: 640}), 0.1)
    assert (found.measured.kv_tokens(MODEL), found.measured.kv_tokens(OTHER)) == (640, 0)
    closed = status("a", holding(Tier.HOST, 0), seq=3)
    found.on_status(msgspec.structs.replace(closed, kv_shares={OTHER: 96}), 0.2)  # of another model
    assert found.measured.kv_tokens(MODEL) == 640


def test_an_older_report_that_comes_late_changes_nothing() -> None:
    found = cluster()
    found.on_status(status("a", holding(Tier.GPU, 0, 1), seq=3), 0.0)
    found.on_status(status("a", holding(Tier.GPU, 0), seq=2), 0.0)
    assert found.held(A, MODEL, GPU) == {0, 1}


def test_more_room_is_noticed() -> None:
    found = cluster()
    assert not found.on_status(status("a", seq=2, free=600), 0.0).more_room
    assert found.on_status(status("a", seq=3, free=1000), 0.0).more_room
    assert not found.on_status(status("a", seq=3, free=2000), 0.0).more_room


def test_what_has_come_since_a_node_said_what_is_free() -> None:
    found = cluster(holding(Tier.GPU, 0), holding(Tier.DISK, 1, model_id=OTHER))
    assert found.come_since(A) == found.come_since(B) == []
    found.on_arrived(arrival(A, MODEL, 1), 0.0)
    assert found.come_since(A) == [], "it had space for that already"
    found.on_arrived(arrival(A, OTHER, 1), 0.0)
    assert found.come_since(A) == [OTHER]
    both = holding(Tier.GPU, 0, 1), holding(Tier.GPU, model_id=OTHER)
    found.on_status(status("a", *both, seq=2), 0.0)
    assert found.come_since(A) == []


def test_a_report_says_which_models_it_changes() -> None:
    """A node may have a hundred models, and most of its reports concern only one that it loads."""
    other = holding(Tier.GPU, 0, model_id=OTHER)
    found = cluster(holding(Tier.GPU, 0), other)
    more = status("a", holding(Tier.GPU, 0, 1), other, seq=2)
    change = found.on_status(more, 0.0)
    assert change.models == {MODEL, OTHER}
    assert change.changed == {MODEL}
    assert change.gained == {MODEL: {1}}
    named = msgspec.structs.replace(more, seq=3, since=2, holdings=(holding(Tier.GPU, 0, 1, 2),))
    assert found.on_status(named, 0.0).changed == {MODEL}
    again = msgspec.structs.replace(named, seq=4, since=3, holdings=())
    assert found.on_status(again, 0.0).changed == set()
    dropped = msgspec.structs.replace(again, seq=5, since=4, dropped=(MODEL,))
    assert found.on_status(dropped, 0.0).changed == {MODEL}
    found.validate()
    faster = msgspec.structs.replace(again, seq=6, since=5, profile=Profile(load_bytes_per_s=1e9))
    assert found.on_status(faster, 0.0).changed == {OTHER}, "its speed is another one"
    found.validate()


def test_what_another_generation_held_is_not_held() -> None:
    found = cluster(holding(Tier.GPU, 0, 1))
    before = found.on_joined(info("a", generation=2))
    assert before is not None
    assert before.generation == 1
    assert found.held(A, MODEL, GPU) == frozenset()


def test_a_report_may_overtake_its_node() -> None:
    found = Cluster()
    found.on_status(status("a", holding(Tier.GPU, 0)), 0.0)
    assert found.held(A, MODEL, GPU) == frozenset()
    assert found.on_joined(info("a")) is None
    assert found.held(A, MODEL, GPU) == {0}


def test_news_of_a_generation_that_is_over_comes_too_late() -> None:
    found = cluster()
    assert found.on_gone(A, Generation(1), 0.0)
    assert not found.on_gone(A, Generation(1), 0.0)
    assert found.on_joined(info("a", generation=1)) is None
    assert not found.nodes
    found.on_joined(info("a", generation=2))
    assert not found.on_gone(A, Generation(1), 0.0)
    assert A in found.nodes


def test_a_generation_may_be_revived_by_the_registry() -> None:
    found = cluster()
    found.on_gone(A, Generation(1), 0.0)
    found.on_revived(info("a", generation=2))
    found.on_joined(info("a", generation=1))
    assert not found.nodes, "it was another that was revived"
    found.on_revived(info("a", generation=1))
    found.on_joined(info("a", generation=1))
    assert A in found.nodes


def test_the_fastest_sender_is_alive_and_holds_something_in_memory() -> None:
    found = cluster(holding(Tier.GPU))
    assert found.fastest_sender(MODEL) is None, "space that is set aside sends nothing"
    for node, tier, rate in (("b", Tier.CACHE, 10), ("c", Tier.GPU, 30), ("d", Tier.DISK, 90)):
        found.on_joined(msgspec.structs.replace(info(node), link_bytes_per_s=rate))
        found.on_status(status(node, holding(tier, 0)), now=0.0)
    assert found.fastest_sender(MODEL) == 30
    found.on_gone(NodeId("c"), Generation(1), 0.0)
    assert found.fastest_sender(MODEL) == 10


def test_a_model_comes_back_from_the_fastest_disk_that_has_it() -> None:
    found, model = cluster(), record()
    found.on_joined(info("b"))
    found.on_joined(info("c"))
    assert found.load_s(model) == model.nbytes / DISK_BYTES_PER_S
    for seq, (node, rate) in enumerate([("b", 10.0), ("c", 50.0), ("b", 20.0), ("c", 5.0)]):
        held = [holding(Tier.DISK, 0)] if seq else []
        said = status(node, *held, seq=seq + 1)
        profile = Profile(load_bytes_per_s=rate)
        found.on_status(msgspec.structs.replace(said, profile=profile), now=0.0)
        found.validate()
        rates = [DISK_BYTES_PER_S, 50.0, 50.0, 20.0]
        assert found.load_s(model) == model.nbytes / rates[seq]
    found.on_gone(NodeId("b"), Generation(1), 0.0)
    assert found.load_s(model) == model.nbytes / 5.0


def test_a_copy_beside_another_comes_back_over_the_fastest_link_or_from_a_faster_disk() -> None:
    found, model = cluster(), record()
    disk_s = model.nbytes / DISK_BYTES_PER_S
    assert found.copy_s(model, usual=0) == disk_s, "nobody sends, and no rate is known"
    assert found.copy_s(model, usual=2 * DISK_BYTES_PER_S) == disk_s / 2
    fast = 4 * DISK_BYTES_PER_S
    found.on_joined(msgspec.structs.replace(info("b"), link_bytes_per_s=fast))
    found.on_status(status("b", holding(Tier.CACHE, 0)), now=0.0)
    assert found.copy_s(model, usual=2 * DISK_BYTES_PER_S) == disk_s / 4
    found.on_joined(msgspec.structs.replace(info("b"), link_bytes_per_s=1))
    assert found.copy_s(model, usual=0) == disk_s, "the link is slower than the disk"


def test_only_a_node_that_leaves_has_a_time_by_which_it_ends() -> None:
    found = Cluster()
    found.on_joined(msgspec.structs.replace(info("a"), leave_by_ns=-1))
    assert found.left_s(A, 0) == float("inf")
    found.on_joined(msgspec.structs.replace(info("a"), leave_by_ns=2 * 10**9, duty=Duty.DRAINING))
    assert found.left_s(A, 10**9) == 1.0
