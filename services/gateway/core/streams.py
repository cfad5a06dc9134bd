"""The order of a request's tokens: each index once, none missing, whatever arrives.

A token names its attempt and its index. Tokens of another attempt are stale; an index that was
seen is a duplicate; one that skips ahead proves a loss, which ends the attempt (the next one
resumes at the first missing index). Sampling depends on (seed, index) only, so what a later
attempt generates continues what an earlier one began. The scores of a prompt go before, with
indices below 0.
"""

import enum

from services.gateway.core.requests import Request
from shared.messages.serving import Scores, Token


class Verdict(enum.Enum):
    NEXT = "next"
    DUPLICATE = "duplicate"
    STALE = "stale"
    GAP = "gap"


def judge(request: Request, piece: Scores | Token) -> Verdict:
    if not request.speaks(piece.attempt):
        return Verdict.STALE
    due = request.due
    if piece.index == due:
        return Verdict.NEXT
    return Verdict.DUPLICATE if piece.index < due else Verdict.GAP


def finish_of(request: Request, token: Token) -> str:
    """Why the request ends with this token, its next one; empty if it goes on.

    The limit is the gateway's own: a node that runs past it is cut off.
    """
    if token.finish:
        return token.finish
    return "length" if token.index + 1 >= request.max_tokens else ""
