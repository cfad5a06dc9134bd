"""Requests go where their KV lies, if that costs nobody anything."""

from random import Random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.affinity import BOUND, LIGHT, learn, prefer
from services.gateway.core.prefixes import PART
from services.gateway.core.requests import Request
from services.gateway.core.routing import choose
from services.gateway.core.sessions import Sessions
from services.gateway.core.table import Table
from shared.ids import ModelId
from shared.messages.instances import InstanceState
from shared.messages.serving import Pooling
from tests.unit.gateway.dispatch.builders import MODEL, Driver, sent
from tests.unit.gateway.support import path, replica
from tests.unit.gateway.test_routing import instance_set, request, table_of

PROMPT = tuple(range(3 * PART))


def asking(name: str = "new", prompt: tuple[int, ...] = PROMPT, session: str = "") -> Request:
    found = request(name)
    found.prompt, found.max_tokens, found.session = prompt, 10, session
    return found


def known_on(table: Table, number: int) -> None:
    """The prompt was computed there."""
    learn(table, asking("before"), table.routes[replica(number).id])


def preferred(table: Table, one: Request, now: float = 0.0) -> str | None:
    kept = prefer(table, one, now)
    return None if kept is None else kept.route.instance.id


def test_a_prompt_goes_where_its_beginning_was_computed() -> None:
    table = table_of((replica(1), 0, 0), (replica(2), 5, 1), (replica(3), 0, 0))
    assert prefer(table, asking(), 0.0) is None
    known_on(table, 2)
    kept = prefer(table, asking(prompt=PROMPT[: 2 * PART + 7]), 0.0)
    assert kept is not None
    assert (kept.route.instance.id, kept.why) == ("replica-2", "for 128 tokens of its prompt")
    assert preferred(table, asking(prompt=PROMPT[1:])) is None, "it begins otherwise"


def adapted(name: str, adapter: str, prompt: tuple[int, ...] = PROMPT) -> Request:
    found = asking(name, prompt)
    found.adapter = ModelId(adapter)
    return found


def test_an_adapter_goes_where_it_ran_and_finds_only_its_own_kv() -> None:
    table = table_of((replica(1), 0, 0), (replica(2), 0, 0), (replica(3), 0, 0))
    learn(table, adapted("a", "sql"), table.routes[replica(2).id])
    other = tuple(range(500, 510))
    kept = prefer(table, adapted("b", "sql", other), 0.0)
    assert kept is not None
    assert (kept.route.instance.id, kept.why) == ("replica-2", "for its adapter")
    assert preferred(table, adapted("c", "poems")) is None, "the same prompt has other KV"
    assert preferred(table, asking("d")) is None
    known_on(table, 3)
    assert preferred(table, asking("e")) == "replica-3"
    assert preferred(table, adapted("f", "sql")) == "replica-2"
    table.drop_node(table.routes[replica(2).id].instance.leader)
    assert preferred(table, adapted("g", "sql")) is None


def test_of_several_with_as_much_the_least_loaded_is_taken() -> None:
    table = table_of((replica(1), 90, 1), (replica(2), 50, 1), (replica(3), 0, 0))
    known_on(table, 1)
    known_on(table, 2)
    assert preferred(table, asking()) == "replica-2"


def test_a_session_has_the_same_home_at_every_gateway_and_after_a_new_set() -> None:
    many = [replica(i) for i in range(20)]
    one, other = table_of(*((r, 0, 0) for r in many)), Table()
    other.apply(instance_set(1, 1, *reversed(many)))
    homes = set()
    for i in range(50):
        found = preferred(one, asking(session=f"s{i}"))
        assert found == preferred(other, asking(session=f"s{i}"))
        homes.add(found)
    assert len(homes) > 10
    home = preferred(one, asking(session="s"))
    one.apply(instance_set(1, 2, *(r for r in many if r.id != home)))
    stand_in = preferred(one, asking(session="s"))
    assert stand_in is not None
    assert stand_in != home
    one.apply(instance_set(1, 3, *many))
    assert preferred(one, asking(session="s")) == home, "it is back"


def test_a_session_stays_where_its_kv_is_when_its_home_changes() -> None:
    """A replica that becomes slower has fewer points on the ring, so that some sessions move."""
    before = replica(1), replica(2)
    table = table_of(*((each, 0, 0) for each in before))
    homes = {f"s{i}": preferred(table, asking(session=f"s{i}")) for i in range(50)}
    slower = msgspec.structs.replace(replica(1), capacity=0.5)
    after = table_of((slower, 0, 0), (replica(2), 0, 0))
    moved = next(s for s, home in homes.items() if home != preferred(after, asking(session=s)))
    (node,) = (each for each in before if each.id == homes[moved])
    learn(table, asking("first", session=moved), table.routes[node.id])
    table.apply(instance_set(1, 2, slower, replica(2)))
    second = asking("second", (*PROMPT, 1, 2), session=moved)
    assert preferred(table, second) == node.id
    assert preferred(table, asking("other", PROMPT[1:], session=moved)) != node.id, "a new chat"
    assert preferred(table, asking("new", session="another")) is not None
    table.routes[node.id].prefill(len(PROMPT) + 3)
    assert preferred(table, second) not in (None, node.id), "it could begin at its home"


def test_sessions_that_were_not_used_lately_are_forgotten() -> None:
    sessions, node = Sessions(known=2), replica(1).leader
    for name in ("a", "b", "a", "c"):
        sessions.learn(name, node)
    assert [sessions.last(name) for name in ("a", "b", "c")] == [node, None, node]


def test_what_could_begin_elsewhere_does_not_wait_for_its_kv() -> None:
    """The instance is full, or shunned, drains, or has more left to prefill than is saved."""
    table = table_of((replica(1, slots=8), 0, 0), (replica(2), 0, 0))
    known_on(table, 1)
    route, one = table.routes[replica(1).id], asking()
    assert preferred(table, one) == "replica-1"
    route.prefill(len(PROMPT) + 1)
    assert preferred(table, one) is None
    route.prefill(-1)
    assert preferred(table, one) == "replica-1"
    one.shunned = {replica(1).id: 1.0}
    assert preferred(table, one) is None
    assert preferred(table, one, now=1.0) == "replica-1"
    for number in range(8):
        route.begin(request(f"r{number}"), 0, 0)
    assert preferred(table, one, now=1.0) is None
    table.apply(instance_set(1, 2, replica(1, state=InstanceState.DRAINING), replica(2)))
    assert preferred(table, asking(session="s")) == "replica-2"


def test_what_is_not_cached_has_to_find_kv() -> None:
    table = table_of((replica(1), 0, 0), (replica(2), 0, 0))
    known_on(table, 1)
    longer, leader = asking(prompt=(*PROMPT, *range(7))), replica(1).leader
    for free, expected in ((6, None), (7, "replica-1")):
        table.hear_kv(leader, free, now=0.0)
        assert preferred(table, longer) == expected
    table.hear_kv(leader, -1, now=0.0)
    assert preferred(table, asking()) is None, "others there wait for KV"


@given(
    running=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3000)), min_size=2, max_size=8),
    session=st.sampled_from(["", "a", "b"]),
    known=st.integers(0, 1),
)
def test_affinity_keeps_the_load_in_bounds(
    running: list[tuple[int, int]], session: str, known: int
) -> None:
    table = table_of(
        *((replica(i), tokens if count else 0, count) for i, (count, tokens) in enumerate(running))
    )
    known_on(table, known)
    one = asking(session=session)
    if (kept := prefer(table, one, 0.0)) is None:
        return
    everything = sum(r.tokens for r in table.routes.values()) + one.work
    light = len(kept.route.requests) < LIGHT * kept.route.instance.slots
    assert light or kept.route.tokens <= (1 + BOUND) * everything / len(running)
    assert kept.route.takes(0.0)


def test_of_one_hot_prefix_no_instance_gets_more_than_its_bound() -> None:
    """A thousand requests with one prompt, which none ends."""
    table = table_of(*((replica(i, slots=1000), 0, 0) for i in range(10)))
    draw, now = Random(0).random, 0.0
    for number in range(1000):
        one = asking(f"r{number}")
        kept = prefer(table, one, now)
        route = kept.route if kept else choose(table, one, now, draw)
        assert route is not None
        route.begin(one, one.work, 0)
        learn(table, one, route)
    most = max(len(route.requests) for route in table.routes.values())
    assert most <= max(LIGHT * 1000, (1 + BOUND) * 100 + 1)


def test_paths_keep_no_prefix() -> None:
    table = table_of((path(1, 2), 0, 0))
    learn(table, asking(), table.routes[path(1, 2).id])
    assert preferred(table, asking()) is None
    assert preferred(table, asking(session="s")) is None


def test_images_and_scored_or_averaged_prompts_have_no_prefix() -> None:
    table = table_of((replica(1), 0, 0), (replica(2), 0, 0))
    known_on(table, 1)
    scored, image, mean, last = asking(), asking(), asking(), asking()
    scored.score_from, image.image = 1, b"pixels"
    mean.pooling, last.pooling = Pooling.MEAN, Pooling.LAST
    assert preferred(table, scored) is None
    assert preferred(table, image) is None
    assert preferred(table, mean) is None
    assert preferred(table, last) is not None


# --- in the dispatch core --------------------------------------------------------


def test_the_second_turn_of_a_chat_follows_the_first_and_its_answer() -> None:
    driver = Driver(replica(1), replica(2))
    answer = [7] * PART
    (first,) = sent(driver.admit("a", prompt=PART, max_tokens=PART))
    for index in range(PART):
        driver.give("a", 1, index, "length" if index == PART - 1 else "")
    second = asking("b", (*range(PART), *answer, 1, 2))
    second.model_id = MODEL
    commands = driver.dispatch.admit([second], driver.now)
    assert [instance for _, instance, _ in sent(commands)] == [first[1]]
    told = [step.text for step in driver.dispatch.story("b")]
    assert any("for 128 tokens of its prompt" in text for text in told), told
    driver.dispatch.validate()
