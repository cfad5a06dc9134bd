"""What a gateway says of itself to those who choose among gateways."""

import msgspec

from services.gateway.core.pressure import Pressure, pressure
from services.gateway.core.requests import Request, State
from services.gateway.picker import PickerPage
from shared.ids import ModelId, ModelName, NodeId, RequestId
from shared.messages.serving import Sampling, Token, Tokens
from tests.support.pages import page
from tests.unit.gateway.dispatch.builders import Driver
from tests.unit.gateway.support import replica
from tests.unit.planner.scripted import record

SQL, POEMS = ModelId("id-sql"), ModelId("id-poems")


def request(name: str, state: State, adapter: ModelId) -> Request:
    made = Request(
        RequestId(name), ModelId("base"), (1,), 4, (), Sampling(), waiting_since=0.0,
        adapter=adapter,
    )  # fmt: skip
    made.state = state
    return made


def test_requests_by_state_and_the_mean_of_their_leaders() -> None:
    requests = [
        request("a", State.QUEUED, POEMS),
        request("b", State.SUBMITTED, SQL),
        request("c", State.STREAMING, ModelId("")),
        request("d", State.MOVING, SQL),
    ]
    found = pressure(
        requests,
        [NodeId("n0"), NodeId("n1"), NodeId("n0")],
        {NodeId("n0"): 0.5, NodeId("n1"): 0.25, NodeId("idle"): 1.0},
    )
    assert found == Pressure(
        waiting=1,
        running=3,
        kv_used=0.375,
        waiting_adapters=frozenset({POEMS}),
        running_adapters=frozenset({SQL}),
    )
    assert pressure((), (), {NodeId("n0"): 1.0}).kv_used == 0


def test_a_gateway_knows_its_nodes_by_what_they_answer() -> None:
    driver = Driver(replica(0), replica(1))
    driver.admit("r")
    (request,) = driver.dispatch._ledger.requests.values()
    leader = next(route.leader for _, route, running in driver.dispatch.instances() if running)
    assert driver.dispatch.pressure().kv_used == 0
    token = Token(request.id, request.attempt, 0, 7)
    driver.dispatch.on_tokens(Tokens(node=leader, tokens=(token,), kv_used=0.75), driver.now)
    now = driver.dispatch.pressure()
    assert (now.waiting, now.running, now.kv_used) == (0, 1, 0.75)
    driver.dispatch.cancel(request.id, driver.now)
    assert driver.dispatch.pressure().kv_used == 0  # nothing of this gateway runs there any more


def test_adapters_by_name_as_far_as_they_are_published() -> None:
    base = record(1)
    now = Pressure(
        waiting=2,
        running=1,
        kv_used=0.25,
        waiting_adapters=frozenset({POEMS, ModelId("removed")}),
        running_adapters=frozenset({SQL}),
    )
    records = {base.name: base}
    shown = PickerPage(lambda: now, lambda: records).families
    plain = {
        "vllm:num_requests_waiting": 2,
        "vllm:num_requests_running": 1,
        "vllm:kv_cache_usage_perc": 0.25,
    }
    assert page(shown) == plain
    for name, model_id in (("sql", SQL), ("poems", POEMS)):
        adapter = msgspec.structs.replace(
            base, name=ModelName(name), model_id=model_id, base=base.model_id
        )
        records[adapter.name] = adapter
    (adapters,) = set(page(shown)) - set(plain)
    assert adapters == (
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql",'
        'waiting_lora_adapters="poems"}'
    )
    first = page(shown)[adapters]
    assert page(shown)[adapters] >= first > 1e9  # the latest is the one that counts
