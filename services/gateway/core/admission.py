"""What a request may ask for, how many may wait, and what instances may be."""

import math

from shared.errors import BadInput, CapacityExceeded
from shared.messages.instances import InstanceSet

MAX_CHOICES = 128
"""Most completions that one HTTP request may ask for (prompts x n)."""
MAX_SCORES = 1 << 20
"""Most log probabilities of prompts in one answer: 120 MB while it is put together."""
_SEED_MASK = (1 << 63) - 1
_SEED_STEP = 0x9E3779B97F4A7C15
"""Odd, so that every choice of a request has another seed (Weyl sequence, golden ratio)."""


def check_queue(waiting: int, arriving: int, limit: int) -> None:
    """All of a call's requests are let in, or none."""
    if waiting + arriving > limit:
        raise CapacityExceeded(
            f"{waiting} requests are waiting for this model and the limit is {limit}: "
            "try again later"
        )


def fault_of(new: InstanceSet) -> str:
    """What makes a set that is well framed mean nothing; empty: nothing does."""
    for instance in new.instances:
        if not instance.stages:
            return f"instance {instance.id!r} has no stages"
        if not 0 <= instance.capacity < math.inf:
            return f"instance {instance.id!r} has a capacity of {instance.capacity}"
    if not 0 <= new.decode_s < math.inf or not 0 <= new.prefill_s_per_token < math.inf:
        return f"a pass takes {new.decode_s} s, and {new.prefill_s_per_token} s a token more"
    return ""


def check_choices(prompts: int, n: int) -> None:
    if prompts * n > MAX_CHOICES:
        raise BadInput(
            f"{prompts} prompts with n={n} make {prompts * n} completions; "
            f"one request may ask for {MAX_CHOICES}"
        )


def check_scores(tokens: int, alternatives: int | None) -> None:
    """Of so many tokens in prompts, with so many alternatives each; None: of none."""
    if alternatives is not None and tokens * (alternatives + 1) > MAX_SCORES:
        raise BadInput(
            f"{tokens} prompt tokens with {alternatives} alternatives each are too many to echo "
            f"with log probabilities: {MAX_SCORES // (alternatives + 1)} at most; send fewer "
            f"prompts in a request"
        )


def output_limit(prompt: int, asked: int | None, default: int | None, context: int) -> int:
    """Most tokens to generate after `prompt` tokens.

    Nothing asked: `default`, but not more than fits; None fills the context. 0 asked: the prompt
    may fill it.
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
    """The seed of a call's choice: that of choice 0 is the given one, modulo 2^63."""
    return (seed + choice * _SEED_STEP) & _SEED_MASK
