"""What pages are shown of the cluster, and what of it each page does not know yet.

A scene has *items*, each under a section and a key, of which the last value counts, and *rows*,
under sections and keys too, which are only added. Every change has the next serial number. A page
names the last number that it knows, and gets everything that changed since: so a slow page misses
what came and went meanwhile, and nobody keeps a queue for it.

Values are kept as JSON, because each is sent to every page as it is.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

import msgspec

GONE = 10_000
"""How many items that are gone are remembered. A page that knows less gets all anew."""
_NULL = msgspec.Raw(b"null")
_encode = msgspec.json.Encoder().encode


class _Kept(msgspec.Struct, gc=False):
    serial: int
    value: msgspec.Raw


class Change(msgspec.Struct):
    """What a page is sent."""

    serial: int
    whole: bool
    """Whether the page forgets what it knew."""
    put: dict[str, dict[str, msgspec.Raw]]
    """By section and key; null: it is gone."""
    add: dict[str, dict[str, list[msgspec.Raw]]]
    """Rows, the oldest first."""
    at_ns: int = 0
    """When it was sent, by the gateway's wall clock."""


class Scene:
    def __init__(self) -> None:
        self.serial = 0
        """The number of the last change."""
        self._items: defaultdict[str, dict[str, _Kept]] = defaultdict(dict)
        self._gone: deque[tuple[int, str, str]] = deque(maxlen=GONE)
        self._rows: defaultdict[str, dict[str, deque[_Kept]]] = defaultdict(dict)

    def put(self, section: str, items: Mapping[str, Any], *, all_there_are: bool = True) -> None:
        """`all_there_are`: whether other items of the section are gone."""
        known = self._items[section]
        for key, value in items.items():
            encoded = msgspec.Raw(_encode(value))
            kept = known.get(key)
            if kept is None or kept.value != encoded:
                known[key] = _Kept(self._next(), encoded)
        if all_there_are:
            for key in known.keys() - items.keys():
                del known[key]
                self._gone.append((self._next(), section, key))

    def add(self, section: str, key: str, rows: Iterable[Any], most: int) -> None:
        """Adds rows. The oldest rows beyond `most` go; pages that have them keep them."""
        known = self._rows[section].get(key)
        if known is None:
            known = self._rows[section][key] = deque()
        for row in rows:
            known.append(_Kept(self._next(), msgspec.Raw(_encode(row))))
            if len(known) > most:
                known.popleft()

    def drop(self, section: str, key: str) -> None:
        """Forgets rows; pages that have them keep them."""
        self._rows[section].pop(key, None)

    def since(self, serial: int) -> Change | None:
        """What changed since; None: nothing. 0: everything."""
        if serial == self.serial:
            return None
        forgotten = self._gone[0][0] if len(self._gone) == GONE else 0
        whole = not 0 < serial < self.serial or serial < forgotten
        after = 0 if whole else serial
        put: dict[str, dict[str, msgspec.Raw]] = {}
        for section, items in self._items.items():
            if new := {key: kept.value for key, kept in items.items() if kept.serial > after}:
                put[section] = new
        for number, section, key in () if whole else self._gone:
            if number > after and key not in self._items[section]:
                put.setdefault(section, {})[key] = _NULL
        add: dict[str, dict[str, list[msgspec.Raw]]] = {}
        for section, series in self._rows.items():
            for key, rows in series.items():
                if new_rows := list(takewhile(lambda row: row.serial > after, reversed(rows))):
                    add.setdefault(section, {})[key] = [row.value for row in reversed(new_rows)]
        return Change(self.serial, whole, put, add)

    def _next(self) -> int:
        self.serial += 1
        return self.serial
