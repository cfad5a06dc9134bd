"""The bodies of the Responses API's answers, and the events of its streams."""

from typing import Any, Literal

import msgspec

from services.gateway.responses.bodies import NamedFunction, ResponsesTool

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class _Tagged(msgspec.Struct, tag_field="type"):
    pass


# --- items of output ---------------------------------------------------------------


class OutputText(_Tagged, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(_Tagged, tag="reasoning_text"):
    text: str


class OutputMessage(_Tagged, kw_only=True, tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class OutputReasoning(_Tagged, kw_only=True, tag="reasoning"):
    id: str
    summary: list[Any] = []
    status: ItemStatus
    content: list[ReasoningText]


class OutputCall(_Tagged, kw_only=True, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    """The text of a JSON object, possibly cut off where the answer is."""
    status: ItemStatus


OutputItem = OutputMessage | OutputReasoning | OutputCall
OutputPart = OutputText | ReasoningText


# --- the response --------------------------------------------------------------------


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ToldFormat(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToldText(msgspec.Struct):
    format: ToldFormat


class ToldReasoning(msgspec.Struct):
    effort: str | None
    summary: None = None


class Response(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    background: bool = False
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: ToldReasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool = False
    temperature: float
    text: ToldText
    tool_choice: Literal["none", "auto", "required"] | NamedFunction
    tools: list[ResponsesTool]
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


# --- events ------------------------------------------------------------------------


class _Event(_Tagged, kw_only=True):
    sequence_number: int = 0
    """Set when the event is written."""


class _OfResponse(_Event, kw_only=True):
    response: Response


class ResponseCreated(_OfResponse, tag="response.created"):
    pass


class ResponseInProgress(_OfResponse, tag="response.in_progress"):
    pass


class ResponseCompleted(_OfResponse, tag="response.completed"):
    pass


class ResponseIncomplete(_OfResponse, tag="response.incomplete"):
    pass


class ResponseFailed(_OfResponse, tag="response.failed"):
    pass


class _OfItem(_Event, kw_only=True):
    output_index: int


class OutputItemAdded(_OfItem, kw_only=True, tag="response.output_item.added"):
    item: OutputItem


class OutputItemDone(_OfItem, kw_only=True, tag="response.output_item.done"):
    item: OutputItem


class _OfPart(_OfItem, kw_only=True):
    item_id: str
    content_index: int = 0


class ContentPartAdded(_OfPart, kw_only=True, tag="response.content_part.added"):
    part: OutputPart


class ContentPartDone(_OfPart, kw_only=True, tag="response.content_part.done"):
    part: OutputPart


class OutputTextDelta(_OfPart, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[Any] = []


class OutputTextDone(_OfPart, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[Any] = []


class ReasoningTextDelta(_OfPart, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(_OfPart, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class CallArgumentsDelta(_OfItem, kw_only=True, tag="response.function_call_arguments.delta"):
    item_id: str
    delta: str


class CallArgumentsDone(_OfItem, kw_only=True, tag="response.function_call_arguments.done"):
    item_id: str
    name: str
    arguments: str


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | CallArgumentsDelta
    | CallArgumentsDone
)
