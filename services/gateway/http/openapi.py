"""The OpenAPI document of the calls. Bodies and answers are described by the classes that they are
decoded and made with."""

import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from services.gateway.http.call import SESSION, SHOW_PATH, Call
from services.gateway.idempotency import KEY, LAST
from services.gateway.unsupported import SILENT, Unsupported, refused_by
from shared.version import __version__

PATH = "/openapi.json"
_AT = "#/components/schemas/{name}"
_Json = dict[str, Any]
_Refs = Mapping[Any, _Json]
"""The schema of each type."""
_IN_PATH = re.compile(r"{(\w+)(?::[^}]*)?}")
_ALWAYS = (403, 421, 429, 500, 503)
_WITH_KEY = (401,)
_WITH_BODY = (400, 408, 413)
_OF_MODEL = (404,)
_GENERATED = (422,)
_KEYED = (409,)
_SAYS: Mapping[int, str] = {
    400: "The request cannot be honoured",
    401: "The API key is missing or unknown",
    403: "A page of an origin that may not call sent the request",
    404: "There is no such model",
    408: "The body did not arrive in time",
    409: "The answer with this idempotency key cannot go on",
    413: "The body is too large",
    421: "The gateway does not have the name in Host",
    422: "The request may not be tried again",
    429: "There is no room now",
    500: "The gateway, or every instance, failed",
    503: "The gateway cannot serve this now",
}
_HEADERS: _Json = {
    "X-Request-ID": {
        "description": "The id of the request: the client's, or a new one",
        "schema": {"type": "string"},
    },
    "Retry-After": {
        "description": "Seconds until it makes sense to come again",
        "schema": {"type": "integer", "minimum": 1},
    },
    "WWW-Authenticate": {
        "description": "How to authenticate",
        "schema": {"type": "string"},
    },
}
_PARAMETERS: _Json = {
    "X-Request-ID": "Becomes the id of the request, in the answer, in logs and in traces",
    "traceparent": "The W3C trace context that the request's span belongs to",
    SESSION: "Names a conversation, which then goes to the instance that has its KV",
    SHOW_PATH: "With an administrator's key, streams have comments that say where tokens come from",
    KEY: "A request with a key that came before gets the answer that it got then",
    LAST: "The id of the last event that the client has of this answer's stream",
}


def document(calls: Iterable[Call], open_paths: Iterable[str]) -> _Json:
    """`open_paths`: those that need no key."""
    calls = list(calls)
    kinds = [kind for call in calls for kind in _kinds(call)]
    refs, schemas = msgspec.json.schema_components(kinds, ref_template=_AT)
    ref = dict(zip(kinds, refs, strict=True))
    ref |= {str: {"type": "string"}, dict: {"type": "object"}}
    for call in calls:
        for body in (call.body, call.form):
            if body is not None:
                _drop_what_is_refused(schemas[body.__name__], body)
    paths: dict[str, _Json] = {}
    for call in calls:
        operation = _operation(call, ref, needs_key=call.path not in open_paths)
        paths.setdefault(_IN_PATH.sub(r"{\1}", call.path), {})[call.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "lambdascale",
            "version": __version__,
            "description": "LLM inference with OpenAI's API. docs/api.md explains the parameters.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "headers": _HEADERS,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _kinds(call: Call) -> list[Any]:
    found = (call.body, call.form, call.events, call.answer, call.error, *call.errors.values())
    return [kind for kind in found if kind not in (None, str, dict)]


def _drop_what_is_refused(schema: _Json, body: type) -> None:
    """Parameters that are known in order to be refused may have the values that change nothing."""
    if not issubclass(body, Unsupported):
        return
    for name in refused_by(body):
        schema["properties"][name] = {"enum": [None, *SILENT.get(name, ())]}


def _operation(call: Call, ref: _Refs, *, needs_key: bool) -> _Json:
    operation: _Json = {
        "operationId": call.name,
        "summary": call.summary,
        "parameters": _parameters(call),
        "responses": {
            "200": _answer(call, ref),
            **{
                str(status): _error(status, ref[call.errors.get(status, call.error)])
                for status in sorted(_statuses(call, needs_key))
            },
        },
        # The gateway may have no keys, so the empty requirement is fulfilled too.
        "security": [{"key": []}, {"x-api-key": []}, {}] if needs_key else [],
    }
    if call.body is not None:
        content = {"application/json": {"schema": ref[call.body]}}
        if call.form is not None:
            content["multipart/form-data"] = {"schema": ref[call.form]}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameters(call: Call) -> list[_Json]:
    headers = ["X-Request-ID"]
    if call.generates:
        headers.append("traceparent")
    if call.keyed:
        headers += [SESSION, SHOW_PATH, KEY, LAST]
    return [
        *(
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _IN_PATH.findall(call.path)
        ),
        *(
            {
                "name": name,
                "in": "header",
                "description": _PARAMETERS[name],
                "schema": {"type": "string"},
            }
            for name in headers
        ),
    ]


def _statuses(call: Call, needs_key: bool) -> set[int]:
    found = {*_ALWAYS}
    for holds, statuses in (
        (needs_key, _WITH_KEY),
        (call.body is not None, _WITH_BODY),
        (call.names_model, _OF_MODEL),
        (call.generates, _GENERATED),
        (call.keyed, _KEYED),
    ):
        if holds:
            found.update(statuses)
    return found


def _answer(call: Call, ref: _Refs) -> _Json:
    kind = "text/plain" if call.answer is str else "application/json"
    content: _Json = {kind: {"schema": ref[call.answer]}}
    description = HTTPStatus.OK.phrase
    if call.events is not None:
        content["text/event-stream"] = {"schema": {"anyOf": [ref[call.events], ref[call.error]]}}
        description = "With `stream`, events, each with JSON of the schema as its `data`"
    return {"description": description, "headers": _headers(), "content": content}


def _error(status: int, schema: _Json) -> _Json:
    extra = {401: ["WWW-Authenticate"], 429: ["Retry-After"], 503: ["Retry-After"]}
    return {
        "description": _SAYS[status],
        "headers": _headers(*extra.get(status, ())),
        "content": {"application/json": {"schema": schema}},
    }


def _headers(*more: str) -> _Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in ("X-Request-ID", *more)}


class Described:
    """Serves the document of some calls, and of its own."""

    def __init__(self, calls: Iterable[Call], open_paths: Iterable[str]) -> None:
        own = Call("GET", PATH, self._show, "describe", "This document", dict)
        self.calls = (*calls, own)
        self._body = msgspec.json.encode(document(self.calls, open_paths))

    async def _show(self, _: web.Request) -> web.Response:
        return web.Response(body=self._body, content_type="application/json")
