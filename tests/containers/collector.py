"""Runs in a container in Jaeger's place: takes spans by OTLP, and names who sent some."""

import gzip
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

senders: set[str] = set()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
            attributes = {a.key: a.value.string_value for a in sent.resource.attributes}
            senders.add(attributes["service.name"])
        self._answer(b"")

    def do_GET(self) -> None:
        """As Jaeger's /api/services."""
        self._answer(json.dumps({"data": sorted(senders)}).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    host = os.environ["JAEGER_LISTEN_HOST"]
    pages = ThreadingHTTPServer((host, 16686), Handler)
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    ThreadingHTTPServer((host, 4318), Handler).serve_forever()
