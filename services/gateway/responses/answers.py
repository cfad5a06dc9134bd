"""The Responses API's answers.

A stream is `response.created` and `response.in_progress`, then for each item of output
`response.output_item.added`, the events of its content and `response.output_item.done`, and at last
the whole response with the event of its status. Sequence numbers count the events from 0.
"""

from collections.abc import Iterator, Sequence

import msgspec

from services.gateway.api_error import ApiError
from services.gateway.asked import Asked
from services.gateway.encoder import WAITING
from services.gateway.generation import Delta, Generation
from services.gateway.replies.parts import Began, Called, Ended, Grew, Reply, Run, Step, Thought
from services.gateway.responses.answer_bodies import (
    CallArgumentsDelta,
    CallArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputPart,
    OutputReasoning,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    OutputTokensDetails,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseStatus,
    ResponseUsage,
    ToldFormat,
    ToldReasoning,
    ToldText,
)
from services.gateway.responses.bodies import ResponsesBody
from services.gateway.text import TextCodec
from shared.clock import wall_ns


class ResponsesAnswers:
    """Implements services.gateway.encoder.Encoder."""

    long = False
    end = b""

    def __init__(
        self,
        body: ResponsesBody,
        asked: Asked,
        generation: Generation,
        answer_id: str,
        codec: TextCodec,
        created: int,
    ) -> None:
        self._body = body
        self._generation = generation
        (self._choice,) = generation.choices
        self._id = answer_id
        self._created = created
        self._reply = Reply()
        self._sequence = 0

    def whole(self, replies: Sequence[Reply]) -> list[bytes]:
        (self._reply,) = replies
        return [msgspec.json.encode(self._response(self._status))]

    # --- events ----------------------------------------------------------------

    def events(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(self._written(event) for delta in deltas for event in self._of(delta))

    def _of(self, delta: Delta) -> Iterator[ResponseEvent]:
        if not self._sequence:
            response = self._response("in_progress")
            yield ResponseCreated(response=response)
            yield ResponseInProgress(response=response)
        steps = self._reply.add(delta.parts)
        if delta.finish:
            steps += self._reply.end()
        for step in steps:
            yield from self._of_step(step)

    def _of_step(self, step: Step) -> Iterator[ResponseEvent]:
        run = step.run
        number, item_id = run.number, self._item_id(run)
        match step:
            case Began():
                yield OutputItemAdded(output_index=number, item=self._item(run, "in_progress"))
                if run.kind is not Called:
                    part = self._part(run, "")
                    yield ContentPartAdded(output_index=number, item_id=item_id, part=part)
            case Grew(_, text) if run.kind is Called:
                yield CallArgumentsDelta(output_index=number, item_id=item_id, delta=text)
            case Grew(_, text) if run.kind is Thought:
                yield ReasoningTextDelta(output_index=number, item_id=item_id, delta=text)
            case Grew(_, text):
                yield OutputTextDelta(output_index=number, item_id=item_id, delta=text)
            case Ended():
                yield self._done(run, item_id)
                if run.kind is not Called:
                    part = self._part(run, run.text)
                    yield ContentPartDone(output_index=number, item_id=item_id, part=part)
                yield OutputItemDone(output_index=number, item=self._item(run, self._state(run)))

    def _done(self, run: Run, item_id: str) -> ResponseEvent:
        number, text = run.number, run.text
        if run.kind is Called:
            return CallArgumentsDone(
                output_index=number, item_id=item_id, name=run.name, arguments=text
            )
        if run.kind is Thought:
            return ReasoningTextDone(output_index=number, item_id=item_id, text=text)
        return OutputTextDone(output_index=number, item_id=item_id, text=text)

    def waiting(self) -> bytes:
        return WAITING

    def last(self) -> bytes:
        response = self._response(self._status)
        if response.status == "incomplete":
            return self._written(ResponseIncomplete(response=response))
        return self._written(ResponseCompleted(response=response))

    def failed(self, error: ApiError) -> bytes:
        response = self._response("failed")
        code = "rate_limit_exceeded" if error.status == 429 else error.code or "server_error"
        response.error = ResponseError(code, str(error))
        return self._written(ResponseFailed(response=response))

    def _written(self, event: ResponseEvent) -> bytes:
        event.sequence_number = self._sequence
        self._sequence += 1
        name: str = type(event).__struct_config__.tag  # type: ignore[assignment]
        return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"

    # --- the response ------------------------------------------------------------

    @property
    def _status(self) -> ResponseStatus:
        return "incomplete" if self._choice.finish == "length" else "completed"

    def _response(self, status: ResponseStatus) -> Response:
        body, sampling = self._body, self._choice.request.sampling
        running = status == "in_progress"
        return Response(
            id=f"resp_{self._id}",
            created_at=self._created,
            completed_at=wall_ns() // 1_000_000_000 if status == "completed" else None,
            status=status,
            error=None,
            incomplete_details=IncompleteDetails("max_output_tokens")
            if status == "incomplete"
            else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            model=self._generation.record.name,
            output=[] if running else [self._item(r, self._state(r)) for r in self._reply.runs],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=ToldReasoning(body.reasoning.effort if body.reasoning else None),
            safety_identifier=body.safety_identifier,
            temperature=sampling.temperature,
            text=ToldText(self._format()),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=sampling.top_p,
            usage=None if running else self._usage(),
            user=body.user,
            metadata=body.metadata or {},
        )

    def _format(self) -> ToldFormat:
        wanted = self._body.text and self._body.text.format
        if not wanted:
            return ToldFormat("text")
        return ToldFormat(wanted.type, wanted.name, wanted.schema, wanted.strict)

    def _usage(self) -> ResponseUsage:
        usage = self._generation.usage()
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(
                usage.completion_tokens_details.reasoning_tokens
            ),
            total_tokens=usage.total_tokens,
        )

    # --- items of output -----------------------------------------------------------

    def _state(self, run: Run) -> ItemStatus:
        """Of a run when the reply has ended, or another has begun."""
        last = run is self._reply.runs[-1]
        return "incomplete" if last and self._choice.finish in (None, "length") else "completed"

    def _item_id(self, run: Run) -> str:
        prefix = {Called: "fc", Thought: "rs"}.get(run.kind, "msg")
        return f"{prefix}_{self._id}_{run.number}"

    def _item(self, run: Run, status: ItemStatus) -> OutputItem:
        id_, begun = self._item_id(run), status == "in_progress"
        if run.kind is Called:
            arguments = "" if begun else run.text
            return OutputCall(
                id=id_, call_id=run.id, name=run.name, arguments=arguments, status=status
            )
        if run.kind is Thought:
            thoughts = [] if begun else [ReasoningText(run.text)]
            return OutputReasoning(id=id_, status=status, content=thoughts)
        texts = [] if begun else [OutputText(run.text)]
        return OutputMessage(id=id_, status=status, content=texts)

    @staticmethod
    def _part(run: Run, text: str) -> OutputPart:
        return ReasoningText(text) if run.kind is Thought else OutputText(text)
