"""Notices as clouds give them, over a real file and a real HTTP server."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node import notice
from services.node.notice import Notice, NoticeWatch, read
from shared import telemetry
from shared.errors import BadInput, ConfigError

LOG = telemetry.logger("test")
WAIT_S = 100.0
AT_NS = 1_789_719_600 * 10**9
"""2026-09-18T08:20:00Z."""


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("FALSE", None),
        ("NONE\n", None),
        ("TRUE", Notice()),
        ("", Notice()),
        ("\n", Notice()),
        ("TERMINATE_ON_HOST_MAINTENANCE", Notice()),
        ('{"action": "terminate", "time": "2026-09-18T08:22:00Z"}', Notice(120.0)),
        ("2026-09-18T08:22:00Z", Notice(120.0)),
        ("2026-09-18T10:22:00+02:00", Notice(120.0)),
        ("2026-09-18T08:22:00", Notice(120.0)),
        ("2026-09-18T08:00:00Z", Notice(0.0)),
    ],
)
def test_what_a_notice_says(text: str, means: Notice | None) -> None:
    assert read(text, AT_NS) == means


@pytest.mark.parametrize("text", ["<html>", "{}", '{"time": 5}', "soon", '{"time": "soon"}', "{"])
def test_what_is_no_notice_does_not_make_a_node_leave(text: str) -> None:
    with pytest.raises(BadInput, match="is no notice"):
        read(text, AT_NS)


@given(st.text() | st.text().map("{{{}".format) | st.datetimes().map(str))
def test_any_text_is_a_notice_or_refused(text: str) -> None:
    try:
        found = read(text, AT_NS)
    except BadInput:
        return
    assert found is None or found.left_s is None or found.left_s >= 0


class Metadata(BaseHTTPRequestHandler):
    """A metadata service as AWS has it, whose sessions need a token."""

    answers: ClassVar[tuple[int, bytes]] = (404, b"")
    asked: ClassVar[list[str]]
    looked: ClassVar[threading.Event]

    def do_PUT(self) -> None:
        self._say(200 if self.headers.get("X-aws-ec2-metadata-token-ttl-seconds") else 400, b"key")

    def do_GET(self) -> None:
        token = self.headers.get("X-aws-ec2-metadata-token")
        self._say(*self.answers if token == "key" else (401, b""))
        if token:
            self.looked.set()

    def _say(self, code: int, body: bytes) -> None:
        self.asked.append(f"{self.command} {self.path}")
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def metadata() -> Iterator[tuple[type[Metadata], str]]:
    class Handler(Metadata):
        asked: ClassVar[list[str]] = []
        looked = threading.Event()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield Handler, f"http://127.0.0.1:{server.server_port}/latest/meta-data/spot"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "POLL_S", 0.01)


async def test_a_notice_of_a_metadata_service(tmp_path: Path) -> None:
    with metadata() as (service, url):
        watch = NoticeWatch(url, tmp_path, LOG)
        await watch.over()
        coming = asyncio.create_task(watch.come())
        service.looked.clear()
        assert await asyncio.to_thread(service.looked.wait, WAIT_S)
        assert not coming.done()
        service.answers = (200, b'{"action": "stop", "time": "2000-01-01T00:00:00Z"}')
        async with asyncio.timeout(WAIT_S):
            assert await coming == Notice(0.0)
        get = "GET /latest/meta-data/spot"
        assert service.asked[:3] == [get, "PUT /latest/api/token", get]


@pytest.mark.parametrize("answers", [(500, b"TRUE"), (200, b"<html>"), (200, b"\xff")])
async def test_a_service_that_says_nothing_of_use_is_asked_again(
    tmp_path: Path, answers: tuple[int, bytes]
) -> None:
    with metadata() as (service, url):
        service.answers = answers
        watch = NoticeWatch(url, tmp_path, LOG)
        await watch.over()
        assert watch._trouble
        service.answers = (200, b"TRUE")
        async with asyncio.timeout(WAIT_S):
            assert await watch.come() == Notice()
        assert not watch._trouble
    await watch.over()  # nobody is there
    assert "refused" in watch._trouble


async def test_a_notice_in_a_file_and_its_end(tmp_path: Path) -> None:
    watch = NoticeWatch("gone", tmp_path, LOG)
    await watch.over()
    (tmp_path / "gone").touch()
    async with asyncio.timeout(WAIT_S):
        assert await watch.come() == Notice()
        over = asyncio.create_task(watch.over())
        while not (await watch._look()):
            pass
        assert not over.done()
        (tmp_path / "gone").write_text("FALSE")
        await over


def test_an_address_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"node\.notice is 'ftp://x'"):
        NoticeWatch("ftp://x", tmp_path, LOG)
