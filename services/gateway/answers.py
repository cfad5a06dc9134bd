"""The OpenAI API's answers: whole ones, and the events of a stream.

Events of one choice differ only in their text, so everything else is encoded once for each choice.
"""

from collections.abc import Sequence

import msgspec

from services.gateway.answer_bodies import PromptLogprob
from services.gateway.api_error import ApiError
from services.gateway.asked import Asked
from services.gateway.choices import CONTEXT, Choice
from services.gateway.encoder import WAITING
from services.gateway.generation import Delta, Generation
from services.gateway.pieces import Listed, Lists, listed
from services.gateway.replies.messages import delta_of, message_of
from services.gateway.replies.parts import Part, Reply, Said, said
from services.gateway.text import Offsets, TextCodec
from shared.messages.serving import Logprobs

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""The API's value for an impossible token."""
_encode = msgspec.json.encode


class Answers:
    def __init__(
        self,
        asked: Asked,
        generation: Generation,
        answer_id: str,
        codec: TextCodec,
        created: int,
    ) -> None:
        """`created`: when the answer was begun, in seconds since the epoch."""
        self._asked = asked
        self._codec = codec
        self._generation = generation
        self._chat = asked.chat
        kind = "chat.completion" if self._chat else "text_completion"
        if asked.stream and self._chat:
            kind += ".chunk"
        self._common: dict[str, object] = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{answer_id}",
            "object": kind,
            "created": created,
            "model": generation.record.name,
            "system_fingerprint": f"ls-{generation.record.model_id[:12]}",
        }
        self._head = b"data: " + _encode(self._common)[:-1] + b',"choices":['
        text = b'"delta":{"content":' if self._chat else b'"text":'
        self._before = [
            self._head + b'{"index":%d,' % choice.index + text for choice in generation.choices
        ]
        self._after = (b"}" if self._chat else b"") + b',"logprobs":null,"finish_reason":null}'
        self._echoes = asked.echo
        self._no_usage = b'],"usage":null}\n\n' if asked.usage_at_end else b"]}\n\n"
        """How events end that say nothing of the usage."""
        self._begun: set[int] = set()
        """Choices for which the stream has said what goes before their first token."""
        self._by_token = asked.token_ids or asked.logprobs
        """Whether every token has an event of its own, with text or not."""
        self._offsets = [
            Offsets(codec, () if self._echoes else choice.request.prompt[-CONTEXT:], choice.echo)
            for choice in generation.choices
            if asked.logprobs
        ]

    # --- whole ---------------------------------------------------------------

    def whole(self, replies: Sequence[Reply]) -> list[bytes]:
        """See `Encoder`."""
        lists = Lists()
        choices = [
            self._choice(choice, reply, lists.add)
            for choice, reply in zip(self._generation.choices, replies, strict=True)
        ]
        usage = self._generation.usage()
        of_prompt = self._of_prompt(self._generation.choices[0], lists.add) if self._chat else {}
        return lists.into({**self._common, "choices": choices, "usage": usage, **of_prompt})

    @property
    def long(self) -> bool:
        """Whether a whole answer has a line for every token, and takes long to write."""
        return self._asked.alternatives is not None

    def _choice(self, choice: Choice, reply: Reply, listed: Listed) -> dict[str, object]:
        body: dict[str, object] = {"text": choice.echo + reply.content}
        if self._chat:
            body = {"message": message_of(reply)}
        echoed, scores = self._prompt(choice) if self._echoes else ((), ())
        return {
            "index": choice.index,
            **body,
            "logprobs": self._logprobs(
                choice, (*echoed, *choice.tokens), (*scores, *choice.logprobs), listed
            ),
            "finish_reason": choice.finish,
            **({"token_ids": choice.tokens} if self._asked.token_ids else {}),
            **({} if self._chat else self._of_prompt(choice, listed)),
        }

    # --- log probabilities ---------------------------------------------------

    def _logprobs(
        self,
        choice: Choice,
        tokens: Sequence[int],
        logprobs: Sequence[Logprobs | None],
        listed: Listed,
    ) -> dict[str, object] | None:
        """The log probabilities of the next tokens of the choice; None if they were not asked
        for."""
        most = self._asked.sampling.logprobs
        if most is None:
            return None
        logprobs = [found and Logprobs(found.drawn, found.top[:most]) for found in logprobs]
        pairs = list(zip(tokens, logprobs, strict=True))
        if self._chat:
            content = (
                {
                    **self._named(token, found.drawn),
                    "top_logprobs": [self._named(*one) for one in found.top],
                }
                for token, found in pairs
                if found
            )
            return {"content": listed(content), "refusal": None}
        offsets = self._offsets[choice.index]
        return {
            "tokens": listed(self._text(token) for token in tokens),
            "token_logprobs": listed(found and _finite(found.drawn) for found in logprobs),
            "top_logprobs": listed(
                found and self._alternatives(token, found) for token, found in pairs
            ),
            "text_offset": listed(offsets.next(token) for token in tokens),
        }

    def _prompt(self, choice: Choice) -> tuple[Sequence[int], Sequence[Logprobs | None]]:
        """The echoed tokens with their log probabilities. The very first token follows none, so it
        has none."""
        return choice.request.prompt, (None, *choice.prompt_logprobs)

    def _of_prompt(self, choice: Choice, listed: Listed) -> dict[str, object]:
        """The log probabilities of the prompt's tokens, in vLLM's form, if they were asked for."""
        most = self._asked.prompt_logprobs
        if most is None:
            return {}
        tokens = choice.request.prompt[1:]
        pairs = zip(tokens, choice.prompt_logprobs, strict=True)
        found = (self._ranked(token, one, most) for token, one in pairs)
        return {"prompt_logprobs": listed([None, *found])}

    def _ranked(self, token: int, found: Logprobs, most: int) -> dict[str, PromptLogprob]:
        """The token and the `most` most probable, by their ids."""
        ranks = {one: rank for rank, (one, _) in enumerate(found.top, 1)}
        values = {token: found.drawn} | dict(found.top[:most])
        return {
            str(one): PromptLogprob(
                _finite(value),
                ranks.get(one),
                self._codec.token_bytes(one).decode(errors="replace"),
            )
            for one, value in values.items()
        }

    def _alternatives(self, token: int, found: Logprobs) -> dict[str, float]:
        """Log probabilities by text. Of tokens with the same text, the most probable counts."""
        named: dict[str, float] = {}
        for one, value in (*found.top, (token, found.drawn)):
            text, value = self._text(one), _finite(value)
            named[text] = max(value, named.get(text, value))
        return named

    def _named(self, token: int, logprob: float) -> dict[str, object]:
        data = self._codec.token_bytes(token)
        text = data.decode(errors="replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}

    def _text(self, token: int) -> str:
        """The token's text, in the API's notation if it is not made of whole characters."""
        data = self._codec.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    # --- streamed ------------------------------------------------------------

    def events(self, deltas: Sequence[Delta]) -> bytes:
        parts: list[bytes] = []
        for delta in deltas:
            choice, told = delta.choice, delta.parts
            tail = self._usage(delta) if self._asked.usage_in_chunks else self._no_usage
            if (self._chat or self._echoes) and choice.index not in self._begun:
                self._begun.add(choice.index)
                parts += (self._opening(choice), tail)
            if self._by_token and delta.token is not None:
                parts += (self._event_of_token(choice, told, delta.token, delta.logprobs), tail)
            elif len(told) == 1 and isinstance(told[0], Said):
                parts += (self._before[choice.index], _encode(told[0].text), self._after, tail)
            elif told:
                parts += (self._event(choice, {"delta": delta_of(told)}), tail)
            if delta.finish:
                body: dict[str, object] = {"delta": {}} if self._chat else {"text": ""}
                parts += (self._event(choice, body, finish=delta.finish), tail)
        return b"".join(parts)

    def _opening(self, choice: Choice) -> bytes:
        if self._chat:
            content = "" if choice.plain else None
            delta = {"role": "assistant", "content": content, "refusal": None}
            return self._event(choice, {"delta": delta})
        found = self._logprobs(choice, *self._prompt(choice), listed)
        return self._event(choice, {"text": choice.echo}, found)

    def _event_of_token(
        self, choice: Choice, told: Sequence[Part], token: int, logprobs: Logprobs | None
    ) -> bytes:
        body: dict[str, object] = {"text": said(told)}
        if self._chat:
            body = {"delta": delta_of(told)}
        if self._asked.token_ids:
            body["token_ids"] = [token]
        found = self._logprobs(choice, [token], [logprobs], listed) if logprobs else None
        return self._event(choice, body, found)

    def _event(
        self,
        choice: Choice,
        body: dict[str, object],
        logprobs: dict[str, object] | None = None,
        finish: str | None = None,
    ) -> bytes:
        event = {"index": choice.index, **body, "logprobs": logprobs, "finish_reason": finish}
        return self._head + _encode(event)

    def _usage(self, delta: Delta) -> bytes:
        """How events end that have the usage up to this one."""
        return b'],"usage":' + _encode(self._generation.usage(delta)) + b"}\n\n"

    @staticmethod
    def waiting() -> bytes:
        return WAITING

    @property
    def end(self) -> bytes:
        return DONE

    def last(self) -> bytes:
        """The events after those of the choices."""
        if not self._asked.usage_at_end:
            return DONE
        return self._head + b'],"usage":' + _encode(self._generation.usage()) + b"}\n\n" + DONE

    @staticmethod
    def failed(error: ApiError) -> bytes:
        """The end of a stream that fails after it has begun."""
        wait = b"" if error.retry_after is None else b"retry: %d000\n" % error.retry_after
        return wait + b"data: " + error.body + b"\n\n" + DONE


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
