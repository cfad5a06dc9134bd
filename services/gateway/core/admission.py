"""Limits: what a request may ask for, how many requests may wait, and what instance sets may be."""

import math

from shared.errors import BadInput, CapacityExceeded
from shared.messages.instances import InstanceSet
from shared.wording import counted

MAX_CHOICES = 128
"""The most completions that one HTTP request may ask for (prompts x n)."""
MAX_SCORES = 1 << 20
"""The most log probabilities of prompts in one answer, and of generated tokens. They take 120 MB to
build."""
_SEED_MASK = (1 << 63) - 1
_SEED_STEP = 0x9E3779B97F4A7C15
"""Odd, so that every choice of a request gets a different seed (Weyl sequence, golden ratio)."""
MARGIN = 0.8
"""The share of an objective that a prediction may fill, because it errs."""


def full(waiting: int, limit: int, turn_s: float) -> CapacityExceeded:
    """For a request that finds no room in the queue, or loses its place there to a tenant that has
    less of it. `turn_s`: when it should come again, in seconds."""
    return CapacityExceeded(
        f"{counted(waiting, 'request is', 'requests are')} waiting for this model and the limit is "
        f"{limit}: try again later",
        turn_s,
    )


def fault_of(new: InstanceSet) -> str:
    """Why a well-formed set makes no sense; empty if it does."""
    for instance in new.instances:
        ends = [stage.stop for stage in instance.stages]
        if not ends or [stage.start for stage in instance.stages] != [0, *ends[:-1]]:
            return f"the stages of instance {instance.id!r} are no path through a model"
        if any(stage.start >= stage.stop for stage in instance.stages):
            return f"instance {instance.id!r} has a stage without blocks"
        if not 0 <= instance.capacity < math.inf:
            return f"instance {instance.id!r} has a capacity of {instance.capacity}"
    if not 0 <= new.decode_s < math.inf or not 0 <= new.prefill_s_per_token < math.inf:
        return f"a pass takes {new.decode_s} s, and {new.prefill_s_per_token} s a token more"
    return ""


def check_in_time(turn_s: float | None, own_s: float, within_s: float) -> None:
    """Lets a request in that would probably have its first token within its objective, or of which
    nothing is known. CapacityExceeded.

    `turn_s`: until it would begin; `own_s`: from then until its first token.
    """
    if turn_s is not None and turn_s + own_s > MARGIN * within_s:
        raise CapacityExceeded(
            f"a request that comes now would wait {turn_s:.1f} s, the model's objective for the "
            f"first token is {within_s:g} s, and no instance can be added: try again later",
            turn_s + own_s - MARGIN * within_s,
        )


def check_choices(prompts: int, n: int) -> None:
    """BadInput if `n` answers to each of `prompts` prompts are too many for one request."""
    if prompts * n > MAX_CHOICES:
        raise BadInput(
            f"{prompts} prompts with n={n} make {prompts * n} completions; "
            f"one request may ask for {MAX_CHOICES}"
        )


class TooLong(BadInput):
    """A prompt has no room in the model's context."""


def check_prompt(tokens: int, context: int) -> None:
    """TooLong if a prompt of at least `tokens` tokens leaves no room in the model's context."""
    if tokens > context:
        raise TooLong(
            f"This model's maximum context length is {context} tokens. However, the prompt has "
            f"{tokens} tokens or more, which leaves no room for a completion: shorten it"
        )


def check_chars(chars: int, longest: int, context: int) -> None:
    """TooLong if a text of so many characters is certain to leave no room in the model's context.
    `longest`: the most characters that one token stands for."""
    check_prompt(-(-chars // longest), context)


def check_scores(tokens: int, alternatives: int | None) -> None:
    """BadInput if `tokens` tokens of prompts, with this many alternatives each, are too many to
    score. None: nothing is scored."""
    if alternatives is not None and tokens * (alternatives + 1) > MAX_SCORES:
        raise BadInput(
            f"{tokens} prompt tokens with {alternatives} alternatives each have too many log "
            f"probabilities: {MAX_SCORES // (alternatives + 1)} tokens at most; send fewer prompts "
            f"in a request"
        )


def check_generated_scores(tokens: int, alternatives: int) -> None:
    """BadInput if `tokens` tokens, with this many alternatives each, have too many log
    probabilities for an answer."""
    if tokens > most_scored(alternatives):
        raise BadInput(
            f"up to {tokens} tokens with {alternatives} alternatives each have too many log "
            f"probabilities: {most_scored(alternatives)} tokens at most; lower max_tokens or n"
        )


def most_scored(alternatives: int) -> int:
    """The most tokens of an answer that have log probabilities."""
    return MAX_SCORES // (alternatives + 1)


def output_limit(prompt: int, asked: int | None, default: int | None, context: int) -> int:
    """The most tokens to generate after `prompt` tokens.

    If nothing is asked: `default`, but not more than fits; a `default` of None fills the context.
    If 0 is asked, the prompt may fill the context.
    """
    room = context - prompt
    if room < (0 if asked == 0 else 1):
        raise BadInput(
            f"This model's maximum context length is {context} tokens. However, the prompt has "
            f"{prompt} tokens, which leaves no room for a completion: shorten it"
        )
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise BadInput(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{prompt + asked} tokens ({prompt} in the prompt, {asked} for the completion): "
            "shorten either"
        )
    return asked


def derive_seed(seed: int, choice: int) -> int:
    """The seed of a choice. Choice 0 has the given seed, modulo 2^63."""
    return (seed + choice * _SEED_STEP) & _SEED_MASK
