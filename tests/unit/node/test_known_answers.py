"""Whether a node's answers to known tokens have changed, whatever else it is asked."""

import msgspec
import pytest

from services.node.core.known_answers import MOST, KnownAnswers
from shared.errors import EngineFailed
from shared.ids import GatewayId, InstanceId, ModelId, NodeId, RequestId
from shared.known_tokens import TOKENS
from shared.messages.instances import Stage
from shared.messages.serving import AttemptFailed, Logprobs, Sampling, Scores, Submit, Token, Tokens

NODE, MODEL = NodeId("n"), ModelId("m")
QUESTION = Submit(
    request=RequestId("r"),
    attempt=1,
    gateway=GatewayId("g"),
    model_id=MODEL,
    instance=InstanceId("i"),
    stages=(Stage(NODE, "tcp://x", 0, 4),),
    tokens=TOKENS,
    prompt_tokens=len(TOKENS),
    max_tokens=1,
    stop_ids=(),
    sampling=Sampling(logprobs=0),
    score_from=1,
)


def answer(known: KnownAnswers, value: float, submit: Submit = QUESTION, parts: int = 2) -> None:
    """In messages of some parts, and the token at the end."""
    known.asked(submit)
    logprobs = [Logprobs(value, ()) for _ in TOKENS[1:]]
    size = -(-len(logprobs) // parts)
    for start in range(0, len(logprobs), size):
        scores = Scores(
            submit.request, submit.attempt, start + 1, tuple(logprobs[start : start + size])
        )
        known.told(Tokens(node=NODE, tokens=(), scores=(scores,)))
    known.told(Tokens(node=NODE, tokens=(Token(submit.request, submit.attempt, 0, 7, "length"),)))


def test_an_answer_that_is_the_first_one_has_not_changed() -> None:
    known = KnownAnswers()
    for value in (-1.0, -1.01, -0.99):
        answer(known, value)
    assert not known.changed()


def test_an_answer_that_is_another_has_changed_until_it_is_as_before() -> None:
    known = KnownAnswers()
    answer(known, -1.0)
    answer(known, -9.0)
    assert known.changed() == [MODEL]
    answer(known, -1.0)
    assert not known.changed()
    answer(known, float("nan"))
    assert known.changed() == [MODEL]


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": (*TOKENS[:-1], 99)},
        {"score_from": 2},
        {"adapter": ModelId("a")},
        {"image": b"x"},
        {"takes_over": 1},
        {"stages": (*QUESTION.stages, Stage(NodeId("o"), "tcp://y", 4, 8))},
    ],
)
def test_no_other_question_makes_a_node_doubt_itself(changes: dict[str, object]) -> None:
    """What a gateway asks must not change what the node thinks that it said."""
    known = KnownAnswers()
    answer(known, -1.0)
    answer(known, -9.0, msgspec.structs.replace(QUESTION, request=RequestId("q"), **changes))
    assert not known.changed()


def test_half_an_answer_is_none_and_questions_without_an_answer_are_given_up() -> None:
    known = KnownAnswers()
    answer(known, -1.0)
    known.asked(QUESTION)
    scores = Scores(QUESTION.request, 1, 1, (Logprobs(-9.0, ()),))
    error = EngineFailed("broken")
    failed = AttemptFailed(QUESTION.request, 1, error.code, str(error))
    known.told(Tokens(node=NODE, tokens=(), scores=(scores,), failed=(failed,)))
    assert not known.changed()
    for number in range(2 * MOST):
        known.asked(msgspec.structs.replace(QUESTION, request=RequestId(f"r{number}")))
    assert len(known._open) == MOST


def test_models_that_were_asked_for_long_ago_are_forgotten() -> None:
    known = KnownAnswers()
    for value in (-1.0, -9.0):
        answer(known, value)
    for number in range(MOST):
        other = msgspec.structs.replace(QUESTION, model_id=ModelId(f"m{number}"))
        answer(known, -1.0, other)
    assert not known.changed()
    assert len(known._first) == len(known._last) == MOST
