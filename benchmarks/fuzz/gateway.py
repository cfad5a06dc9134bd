"""A real gateway, over HTTP: bodies drawn from its OpenAPI document, headers, and bytes that are no
HTTP at all."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from benchmarks.fuzz.report import Report
from benchmarks.fuzz.schema import Schemas
from benchmarks.fuzz.values import Source

AT_A_TIME = 8
WITHIN_S = 120.0
"""An answer that takes longer is a hang."""
RAW_SHARE = 0.1
OF_HTTP = frozenset({400, 408})
"""For requests that cannot be read as HTTP, whatever they ask for."""
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Connection: close\r\nContent-Length: 45\r\n\r\n"
    b'{"model": "fuzz", "prompt": "a", "n": 1    }'
)
HEADERS = (
    "X-Request-ID", "traceparent", "X-Session-ID", "Idempotency-Key", "Last-Event-ID",
    "Content-Encoding", "Content-Type", "Origin", "Accept", "Authorization", "x-api-key",
    "anthropic-version", "Expect",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    statuses: frozenset[int]
    """Those that the document declares."""
    body: Mapping[str, Any] | None
    """The schema of its JSON."""
    form: bool
    """Whether it takes a form, too."""


def operations(document: Mapping[str, Any]) -> list[Operation]:
    found = []
    for path, item in document["paths"].items():
        for method, operation in item.items():
            content = operation.get("requestBody", {}).get("content", {})
            body = content.get("application/json", {}).get("schema")
            statuses = frozenset(map(int, operation["responses"]))
            form = "multipart/form-data" in content
            found.append(Operation(method.upper(), path, statuses, body, form))
    return found


def likely(model: str) -> dict[str, list[Any]]:
    return {
        "model": [model],
        "prompt": ["say", [1, 2, 3], ["a", "b"]],
        "input": ["say", ["a"]],
        "messages": [[{"role": "user", "content": "hi"}]],
        "max_tokens": [1, 2, 5],
        "max_completion_tokens": [1, 3],
        "max_output_tokens": [1, 3],
        "n": [1, 1, 2],
        "top_k": [1, 5],
    }


class Gateway:
    def __init__(self, url: str, model: str, seed: int, report: Report) -> None:
        self._url = url
        self._model = model
        self._source = Source(f"gateway {seed}")
        self._report = report

    async def run(self, inputs: int) -> None:
        timeout = aiohttp.ClientTimeout(total=WITHIN_S)
        connector = aiohttp.TCPConnector(limit=AT_A_TIME, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            async with session.get(f"{self._url}/openapi.json") as response:
                document = await response.json()
            found = operations(document)
            likely_values = likely(self._model)
            schemas = document["components"]["schemas"]
            self._schemas = Schemas(self._source, schemas, likely_values)
            with_body = [operation for operation in found if operation.body is not None]
            turn = iter(range(inputs))

            async def work() -> None:
                for _ in turn:
                    if self._source.chance(RAW_SHARE):
                        await self._raw()
                    else:
                        pool = with_body if self._source.chance(0.9) else found
                        await self._call(session, self._source.random.choice(pool))

            async with asyncio.TaskGroup() as group:
                for _ in range(AT_A_TIME):
                    group.create_task(work())

    async def _call(self, session: aiohttp.ClientSession, operation: Operation) -> None:
        source = self._source
        data = b""
        if operation.body is not None:
            odd = source.random.choice((0.0, 0.02, 0.1))
            data = source.json(self._schemas.value(operation.body, odd=odd))
        headers = {"Content-Type": "application/json"} if source.chance(0.95) else {}
        if operation.form and source.chance(0.3):
            data, headers["Content-Type"] = self._form()
        if source.chance(0.2):
            headers[source.random.choice(HEADERS)] = self._header()
        path = operation.path.split("{")[0]
        if path != operation.path:
            path += self._model if source.chance(0.5) else "no%20such%2fthing"
        part = f"{operation.method} {operation.path}"
        example = f"{part} {headers} {data[:600]!r}"
        try:
            async with session.request(
                operation.method, self._url + path, data=data or None, headers=headers
            ) as response:
                text = await response.text(errors="replace")
        except TimeoutError:
            self._report.find(f"{part}: no answer within {WITHIN_S:.0f} s", example)
            return
        except aiohttp.ClientError as error:
            self._report.find(f"{part}: {type(error).__name__}", f"{error} {example}")
            return
        self._report.ended(part, str(response.status))
        self._judge(part, operation, response, text, example)

    def _judge(
        self, part: str, operation: Operation, response: aiohttp.ClientResponse, text: str,
        example: str,
    ) -> None:  # fmt: skip
        status = response.status
        if status >= 500:
            self._report.find(f"{part}: {status}", f"{text[:200]} {example}")
        elif status not in operation.statuses | OF_HTTP:
            self._report.find(f"{part}: undeclared {status}", f"{text[:200]} {example}")
        if response.content_type == "application/json":
            try:
                json.loads(text)
            except ValueError:
                self._report.find(f"{part}: no JSON", f"{text[:200]} {example}")
        if "server_error" in text or '"api_error"' in text:
            self._report.find(f"{part}: an event that says failure", f"{text[-300:]} {example}")

    def _form(self) -> tuple[bytes, str]:
        """The body, and its Content-Type."""
        source, parts = self._source, []
        for name in source.random.sample(("model", "image", "top_k", "x"), 3):
            file = '; filename="f"' if source.chance(0.5) else ""
            encoding = source.random.choice(("", "", "Content-Type: text/plain; charset=x\r\n",
                                             "Content-Transfer-Encoding: base64\r\n",
                                             "Content-Transfer-Encoding: x\r\n"))  # fmt: skip
            value = self._model if name == "model" else source.text()
            head = f'--b\r\nContent-Disposition: form-data; name="{name}"{file}\r\n'
            parts.append(f"{head}{encoding}\r\n{value}")
        data = ("\r\n".join(parts) + "\r\n--b--\r\n").encode()
        kinds = ("; boundary=b", "; boundary=b", "", "; boundary=other", "; boundary=" + "x" * 80)
        kind = "multipart/form-data" + source.random.choice(kinds)
        return (source.damaged(data) if source.chance(0.5) else data), kind

    def _header(self) -> str:
        """Any that a client can send."""
        value = self._source.random.choice(("gzip", "deflate", "*", "x" * 9000, "-1", "end,end"))
        if self._source.chance(0.5):
            value = self._source.text()
        return "".join(each for each in value if each.isprintable()).strip()

    async def _raw(self) -> None:
        """Damaged HTTP. The gateway answers, or hangs up; or waits for more, which we end."""
        split = urlsplit(self._url)
        data = self._source.damaged(REQUEST)
        reader, writer = await asyncio.open_connection(split.hostname, split.port)
        first = b""
        try:
            writer.write(data)
            async with asyncio.timeout(WITHIN_S):
                first = await reader.readline()
                await reader.read()
        except TimeoutError:
            self._report.find(f"raw: no end within {WITHIN_S:.0f} s", repr(data))
        except OSError:
            first = b"- reset"
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        words = first.split()
        status = words[1].decode(errors="replace") if len(words) > 1 else "closed"
        self._report.ended("bytes that are no HTTP", status)
        if status.startswith("5") and status != "505":
            self._report.find(f"raw: {status}", repr(data))
