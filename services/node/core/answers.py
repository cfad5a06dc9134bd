"""What a led sequence tells its gateway after a micro-batch: drawn tokens, scores, a vector."""

from itertools import zip_longest

from services.node.core.microbatches import Command, Emit, Finish
from services.node.core.sequences import Sequence
from shared.messages.serving import Logprobs, Scores, Token


def scores_of(sequence: Sequence, logprobs: tuple[Logprobs, ...], cause: str) -> Command:
    """The scores of the prompt's next tokens."""
    submit = sequence.submit
    index = sequence.scored - submit.prompt_tokens
    sequence.scored += len(logprobs)
    return Emit(
        submit.gateway, Scores(submit.request, submit.attempt, index, logprobs), cause=cause
    )


def vector_of(sequence: Sequence, vector: bytes, cause: str) -> Command:
    """The vector of the prompt, with which the request ends."""
    submit, finish = sequence.submit, Finish.LENGTH.value
    token = Token(
        submit.request, submit.attempt, 0, 0, finish, cached=sequence.cached, vector=vector
    )
    return Emit(submit.gateway, token, cause=cause)


def tokens_of(
    sequence: Sequence, drawn: tuple[int, ...], logprobs: tuple[Logprobs, ...], cause: str
) -> tuple[list[Command], Finish]:
    """The commands for the drawn tokens. Nothing goes out after a token that ends the request."""
    submit = sequence.submit
    commands: list[Command] = []
    finish = Finish.NOT_YET
    for token, its in zip_longest(drawn, logprobs[: len(drawn)]):
        first = not sequence.preempted and len(sequence.tokens) == sequence.prompt
        cached = sequence.cached if first else 0
        index, finish = sequence.append(token)
        out = Token(
            submit.request,
            submit.attempt,
            index,
            token,
            finish.value,
            its,
            cached,
            alone=sequence.alone,
        )
        commands.append(Emit(submit.gateway, out, cause=cause))
        if finish is not Finish.NOT_YET:
            break
    return commands, finish
