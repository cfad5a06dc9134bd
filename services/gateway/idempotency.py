"""The headers by which a client gets an answer again: `Idempotency-Key` and `Last-Event-ID`."""

import hashlib
import re
from typing import NamedTuple

import msgspec
from multidict import MultiMapping

from services.gateway.api_error import ApiError
from services.gateway.credential import credential

KEY, LAST = "Idempotency-Key", "Last-Event-ID"
MAX_KEY = 255
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_MARK = re.compile(r"([1-9][0-9]{0,8}):([0-9a-f]{8})")
END = "end"
"""The id of a stream's last event."""


class Mark(NamedTuple):
    """How much of a choice a client has."""

    events: int = 0
    check: str = ""
    """Of the tokens up to there."""


class Key(msgspec.Struct, frozen=True):
    """Whose answer it is, and what was asked for."""

    client: str
    """Digest of the credential that came with it: no client gets another's answer."""
    name: str
    """The record's in the store."""
    digest: str
    """Of the call and its body."""

    @property
    def seed(self) -> int:
        """For sampling: the answer is a function of the key and the request."""
        data = f"{self.name} {self.digest}".encode()
        return int.from_bytes(hashlib.sha256(data).digest()[:8]) >> 1


def key_of(headers: MultiMapping[str], call: str, body: bytes) -> Key | None:
    """The request's key; None if it has none. `body` is valid JSON. ApiError 400 if the header
    makes no sense."""
    given = headers.getall(KEY, [])
    if not given:
        if LAST in headers:
            raise ApiError(400, f"{LAST} is of use with {KEY} only", param=LAST)
        return None
    if len(given) > 1:
        raise ApiError(400, f"{KEY} was sent {len(given)} times: send one", param=KEY)
    if not _KEY.fullmatch(given[0]):
        message = f"{KEY} must be 1 to {MAX_KEY} visible ASCII characters, such as a UUID"
        raise ApiError(400, message, param=KEY)
    client = _digest(credential(headers))
    canonical = msgspec.json.encode(msgspec.json.decode(body), order="sorted")
    digest = hashlib.sha256(call.encode() + b"\0" + canonical).hexdigest()
    return Key(client, _digest(f"{client} {given[0]}"), digest)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def marks_of(headers: MultiMapping[str], choices: int) -> list[Mark] | None:
    """How much of each choice the client has, by `Last-Event-ID`; None: all of the answer.
    ApiError 400 if it cannot be the id of an event of an answer of so many choices."""
    given = headers.get(LAST, "").strip()
    if not given:
        return [Mark()] * choices
    if given == END:
        return None
    marks = []
    for part in given.split(","):
        if part == "0":
            marks.append(Mark())
        elif found := _MARK.fullmatch(part):
            marks.append(Mark(int(found[1]), found[2]))
    if len(marks) != choices or len(marks) != given.count(",") + 1:
        message = f"{LAST} must be the id of an event of this answer: send it as it came"
        raise ApiError(400, message, param=LAST)
    return marks


def mark(events: int, check: int) -> str:
    return f"{events}:{check:08x}" if events else "0"
