"""A server that answers as the Hugging Face Hub does, as far as its library asks for a model."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" + "0" * 34
TOKEN = "hf_of_the_test"


@dataclass
class Hub:
    """What the server has, which is the model owner/tiny, and what it was asked."""

    files: dict[str, bytes]
    url: str = ""
    said: dict[str, bytes] = field(default_factory=dict)
    """Bytes that it sends instead of those that it lists."""
    gated: bool = False
    dies_after: int | None = None
    """A file's bytes after which it closes the connection, and is out of order from then on."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """Files, and which range of each."""


def blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def listed(name: str, data: bytes) -> dict[str, Any]:
    found = {"rfilename": name, "size": len(data), "blobId": blob(data)}
    if name.endswith("safetensors"):
        digest = hashlib.sha256(data).hexdigest()
        found["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
    return found


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            if model := re.fullmatch(
                r"/api/models/owner/(\w+)(/revision/(\w+))?\?blobs=.*", self.path
            ):
                self.model(model[1], model[3])
            elif file := re.fullmatch(rf"/owner/tiny/resolve/{COMMIT}/(.*)", self.path):
                self.file(file[1])
            else:
                self.refuse(404, "EntryNotFound")

        def model(self, name: str, revision: str | None) -> None:
            if name != "tiny":
                self.refuse(401, "RepoNotFound")
            elif revision not in (None, "main", COMMIT):
                self.refuse(404, "RevisionNotFound")
            else:
                siblings = [listed(name, data) for name, data in hub.files.items()]
                model = {"id": "owner/tiny", "sha": COMMIT, "siblings": siblings}
                self.answer(200, json.dumps(model).encode())

        def file(self, name: str) -> None:
            if hub.gated and self.headers["Authorization"] != f"Bearer {TOKEN}":
                self.refuse(403, "GatedRepo")
                return
            if hub.dies_after == 0:
                self.refuse(503, "")
                return
            asked = self.headers["Range"]
            hub.asked.append((name, asked))
            data = hub.said.get(name, hub.files[name])
            begin = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            if hub.dies_after is None or len(data) < hub.dies_after:
                self.answer(206 if asked else 200, data[begin:])
                return
            self.answer(200, data[: hub.dies_after], {"Content-Length": str(len(data))})
            self.close_connection = True
            hub.dies_after = 0

        def refuse(self, status: int, code: str) -> None:
            self.answer(status, b"", {"X-Error-Code": code})

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    return Answers


@contextmanager
def serving(files: Mapping[str, bytes]) -> Iterator[Hub]:
    hub = Hub(dict(files))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
