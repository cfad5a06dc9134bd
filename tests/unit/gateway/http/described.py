"""Holds what goes over HTTP to the OpenAPI document."""

import json
import re
from types import SimpleNamespace
from typing import Any

import aiohttp
import jsonschema
from aiohttp.tracing import TraceRequestChunkSentParams

from services.gateway.http.openapi import PATH


class Described:
    """A session with `tracing` raises if a body that is accepted, a status, a header or an answer
    is not in the document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = _strict(document)
        self.seen: set[tuple[str, str, int]] = set()
        """Path, method and status of what was checked."""

    @classmethod
    async def at(cls, url: str) -> "Described":
        async with aiohttp.ClientSession(url) as http, http.get(PATH) as response:
            return cls(await response.json())

    def tracing(self) -> aiohttp.TraceConfig:
        config = aiohttp.TraceConfig()

        async def sent(_: Any, ctx: SimpleNamespace, params: TraceRequestChunkSentParams) -> None:
            ctx.sent = getattr(ctx, "sent", b"") + params.chunk

        async def answered(
            _: Any, ctx: SimpleNamespace, params: aiohttp.TraceRequestEndParams
        ) -> None:
            ctx.response = params.response

        async def read(
            _: Any, ctx: SimpleNamespace, params: aiohttp.TraceResponseChunkReceivedParams
        ) -> None:
            self.check(ctx.response, getattr(ctx, "sent", b""), params.chunk)

        config.on_request_chunk_sent.append(sent)
        config.on_request_end.append(answered)
        config.on_response_chunk_received.append(read)
        return config

    def check(self, response: aiohttp.ClientResponse, sent: bytes, body: bytes) -> None:
        """A whole answer and the request before it."""
        found = self._operation(response.method, response.url.path)
        if found is None:
            assert response.status in (403, 404, 405, 421)
            return
        path, operation = found
        kind = response.content_type
        said = operation["responses"][str(response.status)]
        assert {"X-Request-ID"} <= {name for name in said["headers"] if name in response.headers}
        if response.method == "HEAD":
            return
        schema = said["content"][kind]["schema"]
        if kind == "text/plain":
            return
        events = [body] if kind == "application/json" else _events(body)
        for event in events:
            self._hold(json.loads(event), schema)
        if response.status == 200 and sent.startswith(b"{"):
            self._hold(json.loads(sent), _json_of(operation["requestBody"]))
        self.seen.add((path, response.method, response.status))

    def _operation(self, method: str, path: str) -> tuple[str, dict[str, Any]] | None:
        method = "get" if method == "HEAD" else method.lower()
        for template, operations in self.document["paths"].items():
            if method in operations and re.fullmatch(re.sub("{.*?}", ".+", template), path):
                return template, operations[method]
        return None

    def _hold(self, value: object, schema: dict[str, Any]) -> None:
        whole = {**schema, "components": self.document["components"]}
        jsonschema.Draft202012Validator(whole).validate(value)


def _json_of(content: dict[str, Any]) -> Any:
    return content["content"]["application/json"]["schema"]


def _events(body: bytes) -> list[bytes]:
    lines = [line for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [line[6:] for line in lines if line != b"data: [DONE]"]


def _strict(node: Any) -> Any:
    """The document without leave to say more than it names."""
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    found = {key: _strict(value) for key, value in node.items()}
    if found.get("type") == "object" and "properties" in found:
        found.setdefault("additionalProperties", False)
    return found
