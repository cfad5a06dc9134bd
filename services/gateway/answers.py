"""The OpenAI API's answers: whole ones, and the events of a stream.

An event differs from the one before in its text only, so all else is encoded once a choice.
"""

import time
from collections.abc import Iterable

import msgspec

from services.gateway.generation import Choice, Delta, Generation
from services.gateway.openai import ApiError, ChatRequest, CompletionRequest

DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"
"""An SSE comment: clients ignore it, proxies see that the connection lives."""
_encode = msgspec.json.encode


class Answers:
    def __init__(
        self, body: CompletionRequest | ChatRequest, generation: Generation, answer_id: str
    ) -> None:
        self._body = body
        self._generation = generation
        self._chat = isinstance(body, ChatRequest)
        kind = "chat.completion" if self._chat else "text_completion"
        if body.streams and self._chat:
            kind += ".chunk"
        self._common: dict[str, object] = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{answer_id}",
            "object": kind,
            "created": int(time.time()),
            "model": generation.record.name,
            "system_fingerprint": f"ls-{generation.record.model_id[:12]}",
        }
        self._head = b"data: " + _encode(self._common)[:-1] + b',"choices":['
        text = b'"delta":{"content":' if self._chat else b'"text":'
        self._before = [
            self._head + b'{"index":%d,' % choice.index + text for choice in generation.choices
        ]
        self._after = (b"}" if self._chat else b"") + b',"logprobs":null,"finish_reason":null}'
        self._begun: set[int] = set()

    # --- whole ---------------------------------------------------------------

    def whole(self, texts: list[list[str]]) -> bytes:
        """`texts` are the parts of each choice."""
        choices = [
            self._choice(choice, "".join(parts))
            for choice, parts in zip(self._generation.choices, texts, strict=True)
        ]
        usage = self._generation.usage()
        return _encode({**self._common, "choices": choices, "usage": usage})

    def _choice(self, choice: Choice, text: str) -> dict[str, object]:
        body = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {
            "index": choice.index,
            **body,
            "logprobs": None,
            "finish_reason": choice.finish,
            **({"token_ids": choice.tokens} if self._body.return_token_ids else {}),
        }

    # --- streamed ------------------------------------------------------------

    def events(self, deltas: Iterable[Delta]) -> bytes:
        parts: list[bytes] = []
        tail = self._tail()
        for choice, text, token in deltas:
            if self._chat and choice.index not in self._begun:
                self._begun.add(choice.index)
                parts += (self._event(choice, {"role": "assistant", "content": ""}, None), tail)
            if self._body.return_token_ids:
                parts += (self._event_with_id(choice, text, token), tail)
            elif text:
                parts += (self._before[choice.index], _encode(text), self._after, tail)
            if choice.finish:
                parts += (self._event(choice, {}, choice.finish), tail)
        return b"".join(parts)

    def _event(self, choice: Choice, delta: dict[str, str], finish: str | None) -> bytes:
        body: dict[str, object] = {"delta": delta} if self._chat else {"text": ""}
        event = {"index": choice.index, **body, "logprobs": None, "finish_reason": finish}
        return self._head + _encode(event)

    def _event_with_id(self, choice: Choice, text: str, token: int) -> bytes:
        body: dict[str, object] = {"delta": {"content": text}} if self._chat else {"text": text}
        event = {"index": choice.index, **body, "logprobs": None, "finish_reason": None}
        return self._head + _encode({**event, "token_ids": [token]})

    def _tail(self) -> bytes:
        if self._body.usage_in_chunks:
            return b'],"usage":' + _encode(self._generation.usage()) + b"}\n\n"
        return b'],"usage":null}\n\n' if self._body.usage_at_end else b"]}\n\n"

    def last(self) -> bytes:
        """What follows the choices."""
        if not self._body.usage_at_end:
            return DONE
        return self._head + b'],"usage":' + _encode(self._generation.usage()) + b"}\n\n" + DONE

    @staticmethod
    def failed(error: ApiError) -> bytes:
        """The end of a stream that had begun before it failed."""
        return b"data: " + error.body + b"\n\n" + DONE
