"""The order of a request's tokens: each index once, none missing, whatever arrives.

A token names its attempt and its index. Tokens of another attempt are stale. A token whose index
was seen is a duplicate. A token that skips an index proves a loss, which ends the attempt, and the
next attempt resumes at the first missing index. Sampling depends on (seed, index) only, so a later
attempt continues what an earlier one began. The scores of a prompt come before its first token, and
have indices below 0.
"""

import enum

from services.gateway.core.requests import Request
from shared.messages.serving import Scores, Token


class Verdict(enum.Enum):
    NEXT = "next"
    """It has what is due. The beginning of scores may have been seen: where a request moves, its
    old and its new attempt may cut the prompt differently."""
    DUPLICATE = "duplicate"
    STALE = "stale"
    GAP = "gap"


def judge(request: Request, piece: Scores | Token) -> Verdict:
    if not request.speaks(piece.attempt):
        return Verdict.STALE
    due = request.due
    if piece.index > due:
        return Verdict.GAP
    return Verdict.NEXT if due < _end(piece) else Verdict.DUPLICATE


def _end(piece: Scores | Token) -> int:
    """The index after the last one of the piece. That of scores is 0 at most."""
    if isinstance(piece, Token):
        return piece.index + 1
    return min(piece.index + len(piece.logprobs), 0)


def finish_of(request: Request, token: Token) -> str:
    """Why the request ends with this token, its next one; empty if it goes on.

    The limit is the gateway's own: a node that runs past it is cut off.
    """
    if token.finish:
        return token.finish
    return "length" if token.index + 1 >= request.max_tokens else ""
