"""The structure that a request asks of its text: response_format, and vLLM's structured_outputs."""

from typing import Any

import msgspec

from services.gateway.api_error import invalid
from services.gateway.bodies import Common, ResponseFormat, StructuredOutputs
from shared import grammar
from shared.errors import BadInput

ANY_OBJECT = {"type": "object"}
GUIDED = {
    "json": "guided_json",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar",
}
"""vLLM's older names of fields of structured_outputs."""


def grammar_of(body: Common) -> str:
    """The grammar that the text must follow; empty if there is none."""
    asked, wanted = body.response_format, _structure(body)
    if asked is None or asked.type == "text":
        asked = None
    if asked is None and wanted is None:
        return ""
    param = grammar_field(body)
    if asked and wanted:
        invalid(param, "leave out either this or structured_outputs")
    check_ends(body, param)
    try:
        return _of_format(asked) if asked else _of_structure(wanted or StructuredOutputs())
    except BadInput as error:
        invalid(param, str(error))


def check_ends(body: Common, param: str) -> None:
    """Refuses what does not go with a text that has an end, as the field `param` asks for."""
    if body.ignore_eos:
        invalid("ignore_eos", f"can't be used with {param}: its text has an end")
    if body.min_tokens:
        invalid("min_tokens", f"can't be used with {param}: its text may have to end before")


def _structure(body: Common) -> StructuredOutputs | None:
    """What is asked for, by whichever name."""
    guided = {new: getattr(body, old) for new, old in GUIDED.items() if getattr(body, old)}
    if not guided:
        return body.structured_outputs
    if body.structured_outputs or len(guided) > 1:
        invalid(GUIDED[next(iter(guided))], "give one structure only, in structured_outputs")
    return StructuredOutputs(**guided)


def grammar_field(body: Common) -> str:
    """The field of the request that asks for a grammar."""
    asked = body.response_format
    return "structured_outputs" if asked is None or asked.type == "text" else "response_format"


def _of_format(asked: ResponseFormat) -> str:
    if asked.type == "json_object":
        return grammar.from_schema(ANY_OBJECT)
    if asked.json_schema is None:
        invalid("response_format.json_schema", "is needed for type 'json_schema'")
    return grammar.from_schema(asked.json_schema.schema)


def _of_structure(wanted: StructuredOutputs) -> str:
    given = {name: value for name, value in msgspec.structs.asdict(wanted).items() if value}
    if len(given) != 1:
        invalid("structured_outputs", f"give one of {', '.join(wanted.__struct_fields__)}")
    if wanted.json:
        return grammar.from_schema(_schema(wanted.json))
    if wanted.regex:
        return grammar.from_regex(wanted.regex)
    if wanted.choice:
        if not all(wanted.choice):
            invalid("structured_outputs.choice", "texts must not be empty")
        return grammar.from_choice(wanted.choice)
    return grammar.from_lark(wanted.grammar) if wanted.grammar else grammar.from_schema(ANY_OBJECT)


def _schema(given: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except msgspec.DecodeError as error:
        invalid("structured_outputs.json", f"is no JSON object: {error}")
