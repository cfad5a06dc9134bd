"""Where a JSON object ends in text that comes in pieces."""

_PLAIN = frozenset(" \t\r\n,:.+-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
"""What may stand outside of strings, beside brackets. Letters are those of true, false and null;
whether the words are right shows when the object is read."""


class ObjectScan:
    """Looks at each character once."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False
        self.ended = False
        self.broken = False
        """Whether this can become no object any more."""

    def scan(self, text: str, at: int) -> int:
        """Goes on at a place of the text. Returns the place behind the object's end, the place
        where it is broken, or the text's end."""
        for place in range(at, len(text)):
            self._take(text[place])
            if self.broken:
                return place
            if self.ended:
                return place + 1
        return len(text)

    def _take(self, char: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif not self._open:
            self.broken = char != "{"
            self._open.append("}")
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._open.append("}" if char == "{" else "]")
        elif char in "}]":
            self.broken = self._open.pop() != char
            self.ended = not self._open and not self.broken
        elif char not in _PLAIN:
            self.broken = True
