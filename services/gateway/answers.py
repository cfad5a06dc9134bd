"""The OpenAI API's answers: whole ones, and the events of a stream.

An event differs from the one before in its text only, so all else is encoded once a choice.
"""

import time
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from services.gateway.generation import Choice, Delta, Generation
from services.gateway.openai import ApiError, ChatRequest, CompletionRequest, logprobs_of
from services.gateway.text import TextCodec
from shared.messages.serving import Logprobs

DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"
"""An SSE comment: clients ignore it, proxies see that the connection lives."""
LEAST_LOGPROB = -9999.0
"""The API's way to say: impossible."""
_encode = msgspec.json.encode


class Answers:
    def __init__(
        self,
        body: CompletionRequest | ChatRequest,
        generation: Generation,
        answer_id: str,
        codec: TextCodec,
    ) -> None:
        self._body = body
        self._codec = codec
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
        self._by_token = bool(body.return_token_ids) or logprobs_of(body) is not None
        """Every token has an event of its own, with text or not."""
        self._offsets = [0] * len(generation.choices)
        """Characters of the tokens that each choice's log probabilities were given for."""

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
            "logprobs": self._logprobs(choice, choice.tokens, choice.logprobs),
            "finish_reason": choice.finish,
            **({"token_ids": choice.tokens} if self._body.return_token_ids else {}),
        }

    # --- log probabilities ---------------------------------------------------

    def _logprobs(
        self, choice: Choice, tokens: Sequence[int], logprobs: Sequence[Logprobs]
    ) -> dict[str, object] | None:
        """Of these tokens, the next ones of the choice; None if they were not asked for."""
        if logprobs_of(self._body) is None:
            return None
        pairs = list(zip(tokens, logprobs, strict=True))
        if self._chat:
            content = [
                {
                    **self._named(token, found.drawn),
                    "top_logprobs": [self._named(*one) for one in found.top],
                }
                for token, found in pairs
            ]
            return {"content": content, "refusal": None}
        texts = [self._text(token) for token in tokens]
        ends = list(accumulate(map(len, texts), initial=self._offsets[choice.index]))
        self._offsets[choice.index] = ends[-1]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(found.drawn) for found in logprobs],
            "top_logprobs": [
                {
                    self._text(one): _finite(value)
                    for one, value in (*found.top, (token, found.drawn))
                }
                for token, found in pairs
            ],
            "text_offset": ends[:-1],
        }

    def _named(self, token: int, logprob: float) -> dict[str, object]:
        data = self._codec.token_bytes(token)
        text = data.decode(errors="replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}

    def _text(self, token: int) -> str:
        """As the API writes tokens that are no whole characters."""
        data = self._codec.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    # --- streamed ------------------------------------------------------------

    def events(self, deltas: Iterable[Delta]) -> bytes:
        parts: list[bytes] = []
        tail = self._tail()
        for choice, text, token, logprobs in deltas:
            if self._chat and choice.index not in self._begun:
                self._begun.add(choice.index)
                parts += (self._event(choice, {"role": "assistant", "content": ""}, None), tail)
            if self._by_token:
                parts += (self._event_of_token(choice, text, token, logprobs), tail)
            elif text:
                parts += (self._before[choice.index], _encode(text), self._after, tail)
            if choice.finish:
                parts += (self._event(choice, {}, choice.finish), tail)
        return b"".join(parts)

    def _event(self, choice: Choice, delta: dict[str, str], finish: str | None) -> bytes:
        body: dict[str, object] = {"delta": delta} if self._chat else {"text": ""}
        event = {"index": choice.index, **body, "logprobs": None, "finish_reason": finish}
        return self._head + _encode(event)

    def _event_of_token(
        self, choice: Choice, text: str, token: int, logprobs: Logprobs | None
    ) -> bytes:
        body: dict[str, object] = {"delta": {"content": text}} if self._chat else {"text": text}
        found = self._logprobs(choice, [token], [logprobs]) if logprobs else None
        event = {"index": choice.index, **body, "logprobs": found, "finish_reason": None}
        if self._body.return_token_ids:
            event["token_ids"] = [token]
        return self._head + _encode(event)

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


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
