"""The OpenAPI document is valid, and says what the gateway does."""

import re
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest
from openapi_spec_validator import validate

from services.gateway.bodies import ChatBody, CompletionBody
from services.gateway.unsupported import SILENT, Unsupported, refused_by
from tests.unit.gateway.http.builders import ASK, CHAT, events, post
from tests.unit.gateway.http.described import Described
from tests.unit.gateway.support import NAME

DOCS = Path(__file__).parents[4] / "docs/api.md"


@pytest.fixture
async def document(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get("/openapi.json") as response:
        found: dict[str, Any] = await response.json()
    return found


async def test_it_is_valid(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    validate(document)


async def test_it_has_the_calls_of_the_docs(document: dict[str, Any]) -> None:
    table = DOCS.read_text().partition("\n## ")[0]
    named = {
        (method.lower(), re.sub("NAME", "{name}", path))
        for line in table.splitlines()
        if line.startswith("| `")
        for method, path in re.findall(r"`(GET|POST) (\S+?)`", line.split("|")[1])
    }
    assert named == {
        (method, path) for path, calls in document["paths"].items() for method in calls
    }


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
async def test_it_has_the_fields_of_a_body(
    document: dict[str, Any], body: type[Unsupported]
) -> None:
    fields = document["components"]["schemas"][body.__name__]["properties"]
    assert fields.keys() == set(body.__struct_fields__)
    for name in refused_by(body):
        silent = SILENT.get(name, ())
        assert fields[name] == {"enum": [None, *map(list_or_same, silent)]}


def list_or_same(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


async def test_traffic_is_held_to_it(http: aiohttp.ClientSession, described: Described) -> None:
    """As that of all tests with this client is."""
    await post(http, ASK)
    await events(http, {**CHAT, "logprobs": True, "top_logprobs": 1}, "chat/completions")
    await post(http, {**ASK, "model": "other"})
    async with http.get(f"/v1/models/{NAME}") as response:
        await response.read()
    assert described.seen >= {
        ("/v1/completions", "POST", 200),
        ("/v1/completions", "POST", 404),
        ("/v1/chat/completions", "POST", 200),
        ("/v1/models/{name}", "GET", 200),
    }


async def test_what_it_does_not_say_is_noticed(
    http: aiohttp.ClientSession, described: Described
) -> None:
    schemas = described.document["components"]["schemas"]
    del schemas["ModelCard"]["properties"]["task"]
    async with http.get("/v1/models") as response:
        with pytest.raises(jsonschema.ValidationError, match="task"):
            await response.read()
