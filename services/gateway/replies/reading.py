"""Reads a reply's thoughts, content and calls of tools from its text while it is generated.

    opening -> thinking -> beginning -> saying -> entering -> object

    object -> heading -> arguing -> ending -> closing       a call that is sure
    object -> whole -> closing                              a call that may turn out to be none
    entering -> tagged -> closing                           a call written with tags
    closing -> saying, or object for the next of a list     all of the others -> saying: no call

What is certain comes out at once; what may be the beginning of something else waits for the next
text. So the parts are a function of the whole text, however it was cut.

If the text keeps to a grammar (`Form.sure`), a call that begins is one, and its arguments come out
as they are generated. Otherwise a call comes out when it is complete, and what turns out not to be
a call of a known tool is content.
"""

from collections.abc import Callable

import msgspec

from services.gateway.replies.dialects import PYTHON_TAG
from services.gateway.replies.form import THINK, THOUGHT, Form
from services.gateway.replies.json_calls import HEAD, json_call
from services.gateway.replies.parts import Argued, Called, Part, Said, Thought
from services.gateway.replies.scanning import ObjectScan
from services.gateway.replies.tags import FUNCTION_END, tagged_call


class ReplyReader:
    def __init__(self, form: Form, new_id: Callable[[int], str]) -> None:
        """`new_id`: the id of the call with a number."""
        self.calls = 0
        """The number of calls so far."""
        self._form = form
        self._dialect = form.dialect
        self._new_id = new_id
        self._text = ""
        """What is not decided yet."""
        self._at = 0
        """How much of it is read, of a call."""
        self._seen = 0
        """Up to where the end of a call with tags was looked for."""
        self._scan = ObjectScan()
        self._trim = form.thinking
        """Whether white space is left out until something else comes."""
        self._parts: list[Part] = []
        self._state = self._opening if form.thinks else self._beginning
        if form.thinking:
            self._state = self._thinking
        elif form.calling:
            self._state = self._entering

    @property
    def thinking(self) -> bool:
        return self._state == self._thinking

    @property
    def called(self) -> bool:
        """Whether there are calls, the last of them complete."""
        return self.calls > 0 and self._state not in (self._arguing, self._ending)

    def push(self, text: str) -> list[Part]:
        """The parts that became certain."""
        self._text += text
        return self._run(last=False)

    def flush(self) -> list[Part]:
        """The rest, when no text follows."""
        return self._run(last=True)

    def _run(self, last: bool) -> list[Part]:
        while self._state(last):
            pass
        parts, self._parts = self._parts, []
        return parts

    # Each state takes what it can of the text. It returns whether another state is to go on; False
    # if more text is needed.

    # --- thoughts and content ------------------------------------------------------------------

    def _opening(self, last: bool) -> bool:
        begins = self._text.lstrip()
        if THINK.startswith(begins) and begins != THINK and not last:
            return False
        self._state = self._beginning
        if begins.startswith(THINK):
            self._text, self._trim = begins[len(THINK) :], True
            self._state = self._thinking
        return True

    def _thinking(self, last: bool) -> bool:
        end = self._text.find(THOUGHT)
        if end < 0:
            return self._hold(Thought, THOUGHT, last)
        self._emit(Thought, self._text[:end].rstrip())
        self._text, self._trim = self._text[end + len(THOUGHT) :], True
        self._state = self._entering if self._form.calling else self._beginning
        return True

    def _beginning(self, last: bool) -> bool:
        """The first that is no thought."""
        self._state = self._saying
        if self._dialect is None or self._dialect.opening:
            return True
        begins = self._text.lstrip()
        tagged = begins.startswith(PYTHON_TAG)
        bare = begins.removeprefix(PYTHON_TAG).lstrip()
        if (not bare or (not tagged and PYTHON_TAG.startswith(begins))) and not last:
            self._state = self._beginning
            return False
        if bare.startswith("{"):
            self._at = len(self._text) - len(bare)
            self._state = self._object
        else:
            self._dialect = None
        return True

    def _saying(self, last: bool) -> bool:
        if self._dialect is None:
            text, self._text = self._text, ""
            return self._emit(Said, text)
        opening = self._dialect.opening
        begin = self._text.find(opening)
        if begin < 0:
            return self._hold(Said, opening, last)
        said = self._text[:begin].rstrip()
        self._emit(Said, said)
        self._cut(len(said), begin + len(opening))
        self._state = self._entering
        return True

    # --- calls. Their text is kept until it is certain that there is one -----------------------

    def _entering(self, last: bool) -> bool:
        """Behind the opening."""
        assert self._dialect is not None
        self._state = self._object
        if self._dialect.tagged:
            self._seen = self._at
            self._state = self._tagged
        elif self._dialect.listed:
            place = self._next_char()
            if place is None and not last:
                self._state = self._entering
                return False
            if place is None or self._text[place] != "[":
                return self._no_call(len(self._text) if place is None else place)
            self._at = place + 1
        return True

    def _object(self, last: bool) -> bool:
        """A call's object begins with the next character that is no space."""
        place = self._next_char()
        if place is None:
            return self._no_call(len(self._text)) if last else False
        self._at, self._scan = place, ObjectScan()
        self._state = self._heading if self._form.sure else self._whole
        return True

    def _heading(self, last: bool) -> bool:
        """A sure call, up to its arguments."""
        found = HEAD.match(self._text, self._at)
        if found is None:
            return self._no_call(len(self._text)) if last else False
        self._call(msgspec.json.decode(found[1], type=str))
        self._cut(found.end())
        self._state = self._arguing
        return True

    def _arguing(self, last: bool) -> bool:
        end = self._scan.scan(self._text, 0)
        if end:
            self._parts.append(Argued(self.calls - 1, self._text[:end]))
            self._cut(end)
        if not (self._scan.ended or self._scan.broken):
            return False
        self._state = self._ending
        return True

    def _ending(self, last: bool) -> bool:
        """The end of a sure call's object."""
        place = self._next_char()
        if place is None:
            return False
        self._cut(place + (self._text[place] == "}"))
        self._state = self._closing
        return True

    def _whole(self, last: bool) -> bool:
        """A call that may be none, up to its end."""
        begin, end = self._at, self._scan.scan(self._text, self._seen or self._at)
        if self._scan.ended:
            self._seen = 0
            call = json_call(self._text[begin:end], self._form.tools)
            if call is None:
                return self._no_call(end)
            self._called(call.name, call.json, end)
            return True
        self._seen = end
        if self._scan.broken or last:
            self._seen = 0
            return self._no_call(end)
        return False

    def _tagged(self, last: bool) -> bool:
        assert self._dialect is not None
        end = self._text.find(FUNCTION_END, self._seen)
        if end < 0:
            self._seen = max(self._at, len(self._text) - len(FUNCTION_END))
            return self._no_call(len(self._text)) if last else False
        behind = end + len(FUNCTION_END)
        call = tagged_call(self._text[self._at : end], self._form.tools)
        self._seen = 0
        if call is None:
            return self._no_call(behind)
        self._called(call.name, call.arguments, behind)
        return True

    def _closing(self, last: bool) -> bool:
        """Behind a call."""
        assert self._dialect is not None
        rest = self._text.lstrip()
        separator = "" if self._dialect.closing else self._dialect.between.strip()
        if separator and rest.startswith(separator) and self._form.several:
            self._cut(0, len(self._text) - len(rest) + len(separator))
            self._state = self._object
            return True
        closing = "]" if self._dialect.listed else self._dialect.closing
        if not rest or (closing.startswith(rest) and rest != closing):
            if last:
                self._text = ""
            return False
        self._text, self._trim, self._state = rest.removeprefix(closing), True, self._saying
        if not (self._dialect.opening and self._form.several):
            self._dialect = None
        return True

    def _called(self, name: str, arguments: str, end: int) -> None:
        """A complete call, which ends at this place of the text."""
        self._call(name)
        self._parts.append(Argued(self.calls - 1, arguments))
        self._cut(end)
        self._state = self._closing

    def _call(self, name: str) -> None:
        self._parts.append(Called(self.calls, self._new_id(self.calls), name))
        self._trim = False
        self.calls += 1

    def _no_call(self, end: int) -> bool:
        """What was kept up to this place is content after all."""
        assert self._dialect is not None
        self._emit(Said, self._text[:end])
        self._cut(end)
        self._state = self._saying
        if not self._dialect.opening:
            self._dialect = None
        return True

    # --- what the states are made of -----------------------------------------------------------

    def _next_char(self) -> int | None:
        """The place of the next character that is no space; None if there is none yet."""
        rest = self._text[self._at :].lstrip()
        return len(self._text) - len(rest) if rest else None

    def _cut(self, end: int, at: int | None = None) -> None:
        """Forgets the text up to `end`. `at`: up to where it is read."""
        self._text, self._at = self._text[end:], 0 if at is None else at - end

    def _hold(self, kind: type[Said] | type[Thought], marker: str, last: bool) -> bool:
        """Emits the text, but for what may begin the marker, and for white space at its end, which
        goes if the marker comes."""
        text = self._text
        keep = 0
        if not last:
            longest = min(len(marker) - 1, len(text))
            keep = next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)
        certain = text[: len(text) - keep]
        if not last or kind is Thought:
            certain = certain.rstrip()
        self._text = "" if last else text[len(certain) :]
        return self._emit(kind, certain)

    def _emit(self, kind: type[Said] | type[Thought], text: str) -> bool:
        """Returns False, for states that need more text."""
        if self._trim:
            text = text.lstrip()
        if text:
            self._trim = False
            self._parts.append(kind(text))
        return False
