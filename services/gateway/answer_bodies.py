"""The bodies of answers as they go over the wire: what the OpenAPI document says of them.

Short answers are made from these classes. Those of completions are written piece by piece
(`answers.py`); tests hold every answer that they get to these classes.
"""

from typing import Literal

import msgspec


class Status(msgspec.Struct, omit_defaults=True):
    status: str
    error: str | None = None


class ModelsHealth(msgspec.Struct):
    published: int
    served: int
    """Those that an instance serves now."""


class HealthPage(msgspec.Struct, omit_defaults=True):
    status: str
    """`ok`; `degraded`: requests are served, but something is missing; `draining`; `unavailable`:
    requests cannot be served."""
    bus: bool
    registry: bool
    planner: bool
    models: ModelsHealth
    error: str | None = None


# --- errors ----------------------------------------------------------------------


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    error: ErrorDetail


# --- models and tokens -----------------------------------------------------------


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "lambdascale"
    root: str
    parent: str | None
    """The name of an adapter's base. None: it is no adapter."""
    max_model_len: int
    task: str


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


# --- usage -----------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


# --- classification ----------------------------------------------------------------


class ClassifiedAs(msgspec.Struct):
    label: str
    index: int
    probability: float


class Classification(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["classification"] = "classification"
    created: int
    model: str
    data: list[ClassifiedAs]
    usage: Usage


# --- embeddings --------------------------------------------------------------------


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    """Numbers, or their float32 bytes (little-endian) in base64."""
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


# --- completions -------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    """How probable one token is at one place of the prompt."""

    logprob: float
    rank: int | None
    """1: the most probable. Null: not known, because it is none of those that were asked for."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, by token id: the token itself and the most probable. Null for the
first, which follows none."""


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    """Also each event of a stream, whose last one has no choice if it has the usage."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


# --- chats -------------------------------------------------------------------------


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob] | None
    refusal: None


class AnsweredFunction(msgspec.Struct):
    name: str
    arguments: str
    """The text of a JSON object, possibly cut off where the answer is."""


class AnsweredCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: AnsweredFunction


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    """Null if there is none beside calls or thoughts."""
    refusal: None = None
    annotations: tuple[()] = ()
    tool_calls: list[AnsweredCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """The same as `reasoning_content`."""


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Chat(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class FunctionDelta(msgspec.Struct):
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str = ""


class CallDelta(msgspec.Struct):
    """The first of a call has its id, type and name; the others have more of its arguments."""

    index: int
    function: FunctionDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET


class MessageDelta(msgspec.Struct):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    refusal: msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[CallDelta] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct):
    """An event of a stream, whose last one has no choice if it has the usage."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
