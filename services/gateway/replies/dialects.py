"""How families of models write calls of tools."""

from dataclasses import dataclass

SHORT_ID = 9


@dataclass(frozen=True, slots=True)
class Dialect:
    """Calls are `opening`, then JSON objects with `name` and `arguments`, then `closing`."""

    opening: str
    """Goes before calls. Empty: a reply that begins with a call's object has calls and nothing
    else."""
    before: str
    """Between the opening and the first object."""
    after: str
    """Between the last object and the closing."""
    closing: str
    between: str
    """Between two calls. With a `closing`, each call has the opening and closing for itself."""
    arguments: str = "arguments"
    """The key of the arguments."""
    listed: bool = False
    """Whether the calls are a JSON list behind one opening."""
    several: bool = True
    """Whether a reply may have several calls."""
    tagged: bool = False
    """Whether a call is no JSON, but tags with the function and each parameter."""
    short_ids: bool = False
    """Whether the ids of calls have nine letters and digits."""

    def call_id(self, digest: bytes) -> str:
        """An id of a call, made from a digest."""
        return digest.hex()[:SHORT_ID] if self.short_ids else f"call_{digest.hex()[:24]}"


HERMES = Dialect("<tool_call>", "\n", "\n", "</tool_call>", "\n")
"""NousResearch's Hermes, Qwen2.5 and Qwen3."""
QWEN_CODER = Dialect("<tool_call>", "\n", "\n", "</tool_call>", "\n", tagged=True)
"""Qwen3-Coder: <function=name>, and <parameter=key> for each argument."""
MISTRAL = Dialect("[TOOL_CALLS]", " ", "", "", ", ", listed=True, short_ids=True)
"""Mistral since v0.3. Its templates insist on ids of nine letters and digits."""
LLAMA = Dialect("", "", "", "", "; ", arguments="parameters", several=False)
"""Llama 3.1 and later: one JSON object, possibly behind a tag."""
PYTHON_TAG = "<|python_tag|>"
"""Llama's tag, which means nothing if a call's object follows."""


def dialect_of(call: str) -> Dialect | None:
    """The dialect in which a template wrote a call (`Manner.call`); None if it is not known."""
    if "<function=" in call and "<parameter=" in call:
        return QWEN_CODER
    if '"name"' not in call:
        return None
    if HERMES.opening in call and HERMES.closing in call and '"arguments"' in call:
        return HERMES
    if MISTRAL.opening in call and '"arguments"' in call:
        return MISTRAL
    return LLAMA if '"parameters"' in call else None
