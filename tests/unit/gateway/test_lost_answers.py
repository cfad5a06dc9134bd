"""A node's answer to a Submit is lost: the stream goes on all the same."""

from shared.ids import NodeId, RequestId
from shared.messages.instances import InstanceState
from tests.support.coupled import STEP_TOKENS, TIMEOUT_S, Client, Pool, instance

N0 = NodeId("n0")
PROMPT = 20 * STEP_TOKENS
"""Takes 20 sweeps to prefill."""
STEP_S = 0.4


def sweep(pool: Pool, seconds: float = STEP_S) -> None:
    """All nodes run once; all that is under way arrives; time passes."""
    for name in pool.nodes:
        pool.step(name)
    pool.deliver_all()
    pool.wait(seconds)


def moving(pool: Pool) -> Client:
    """A request that streams from a path while its move to a replica on the path's leader is about
    to be submitted."""
    pool.publish(instance(0, 1))
    pool.gateways[0].admit("a", PROMPT, 200)
    pool.deliver_all()
    client = pool.gateways[0].clients[RequestId("a")]
    while not client.tokens:
        sweep(pool)
    pool.publish(instance(0, 1, state=InstanceState.MOVING), instance(0))
    return client


def test_a_move_on_the_same_leader_that_is_not_answered_goes_on_as_if_it_were() -> None:
    """The source has yielded. The gateway asks after some silence, and finds the next attempt
    there. The stream waits for its prompt, as after an answer, and no longer."""
    pool = Pool(nodes=2, slots=2)
    client = moving(pool)
    pool.submit(0, lose="answer")
    assert [sequence.submit.attempt for sequence in pool.led(N0)] == [2]
    begun, sweeps = len(client.tokens), 0
    while len(client.tokens) == begun:
        sweep(pool)
        sweeps += 1
    assert sweeps <= PROMPT // STEP_TOKENS + 1
    while client.open:
        sweep(pool)
    assert client.finish == "length"
    assert not pool.led(N0)


def test_the_source_is_freed_when_the_move_is_answered() -> None:
    pool = Pool(nodes=2, slots=2)
    client = moving(pool)
    pool.deliver_all()
    (left,) = pool.led(N0)
    assert (left.submit.attempt, left.submit.takes_over) == (2, 1)
    while client.open:
        sweep(pool)
    assert client.finish == "length"


def test_an_attempt_that_waits_for_its_prompt_outlives_a_lost_answer() -> None:
    """It was asked about, and its leader answered that it goes on."""
    pool = Pool(nodes=1, slots=2)
    pool.publish(instance(0))
    pool.gateways[0].admit("a", PROMPT, 5)
    pool.submit(0, lose="answer")
    client = pool.gateways[0].clients[RequestId("a")]
    while client.open:
        sweep(pool)
    assert pool.now > TIMEOUT_S
    assert client.request.attempt == 1


def test_an_attempt_whose_leader_falls_silent_is_given_up() -> None:
    pool = Pool(nodes=1, slots=2)
    pool.publish(instance(0))
    pool.gateways[0].admit("a", PROMPT, 5)
    pool.deliver_all()
    client = pool.gateways[0].clients[RequestId("a")]
    while not pool.submits:
        pool.wait(0.5)
    pool.submit(0, lose="question")
    pool.wait(TIMEOUT_S)
    pool.wait(1.0)
    assert client.request.attempt == 2
