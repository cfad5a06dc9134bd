"""Which nodes have an adapter in memory, as far as a gateway knows."""

from services.gateway.core.carriers import CARRIERS, Carriers
from shared.ids import ModelId, NodeId

SQL, POEMS, MATHS = map(ModelId, ("sql", "poems", "maths"))
NODES = [NodeId(f"node-{i}") for i in range(CARRIERS + 1)]


def test_the_last_nodes_of_an_adapter_are_known() -> None:
    carriers = Carriers()
    assert not carriers.of(SQL)
    for node in NODES[:-1]:
        carriers.learn(SQL, node)
    carriers.learn(SQL, NODES[0])
    carriers.learn(SQL, NODES[-1])
    assert set(carriers.of(SQL)) == set(NODES) - {NODES[1]}
    assert not carriers.of(POEMS)


def test_the_adapters_that_were_used_last_are_known() -> None:
    carriers = Carriers(known=2)
    for adapter in (SQL, POEMS, SQL, MATHS):
        carriers.learn(adapter, NODES[0])
    assert [bool(carriers.of(name)) for name in (SQL, POEMS, MATHS)] == [True, False, True]
