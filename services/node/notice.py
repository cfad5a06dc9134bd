"""The notice that a cloud gives before it takes a machine away (setting `node.notice`).

It is a file, or an URL of the cloud's metadata service, and is looked at every second:

- AWS, http://169.254.169.254/latest/meta-data/spot/instance-action: 404, then
  {"action": "terminate", "time": "2026-09-18T08:22:00Z"}, two minutes before. Where the service
  asks for a session token (IMDSv2), the node gets one.
- Google, http://metadata.google.internal/computeMetadata/v1/instance/preempted: FALSE, then TRUE,
  30 s before.
- A file that another program writes: nothing in it, or one of the words above, or a time.
"""

import asyncio
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import msgspec
from structlog.stdlib import BoundLogger

from shared.clock import wall_ns
from shared.errors import BadInput, ConfigError

POLL_S = 1.0
TIMEOUT_S = 2.0
LARGEST = 4096
"""Bytes of a notice that are read."""
NONE = frozenset({"FALSE", "NONE"})
AT_ONCE = frozenset({"", "TRUE", "TERMINATE_ON_HOST_MAINTENANCE"})
HEADERS = {"Metadata-Flavor": "Google"}
TOKEN_PATH = "/latest/api/token"
TOKEN_HEADER = "X-aws-ec2-metadata-token"
TOKEN_LIFE = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}

_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Metadata services answer the machine itself only."""


@dataclass(frozen=True, slots=True)
class Notice:
    left_s: float | None = None
    """Seconds until the machine is gone; None if the notice does not say."""


class _Action(msgspec.Struct, frozen=True):
    time: str


def read(text: str, at_ns: int) -> Notice | None:
    """What the text of a notice means at the time `at_ns` (ns since the epoch); None: nothing yet.

    BadInput if it is none of the forms above: a node does not leave because of a wrong address.
    """
    word = text.strip()
    if word.upper() in NONE:
        return None
    if word.upper() in AT_ONCE:
        return Notice()
    try:
        time = msgspec.json.decode(word, type=_Action).time if word.startswith("{") else word
        moment = datetime.fromisoformat(time)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        left_s = moment.timestamp() - at_ns / 1e9
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise BadInput(f"{word[:200]!r} is no notice: {error}") from error
    return Notice(max(0.0, left_s))


class NoticeWatch:
    def __init__(self, source: str, directory: Path, log: BoundLogger) -> None:
        """`source`: the setting; a relative path lies in `directory`. ConfigError if it is neither
        a path nor an URL of http or https."""
        scheme = urlsplit(source).scheme if "://" in source else ""
        if scheme not in ("", "http", "https"):
            raise ConfigError(f"node.notice is {source!r}: give a path, or an URL of http or https")
        self._url = source if scheme else ""
        self._file = directory / source
        self._log = log
        self._trouble = ""
        """Why the last look failed."""

    async def come(self) -> Notice:
        """Returns when there is a notice."""
        while True:
            if (notice := await self._look()) is not None:
                return notice
            await asyncio.sleep(POLL_S)

    async def over(self) -> None:
        """Returns when there is no notice, at once as a rule."""
        while (notice := await self._look()) is not None:
            self._log.warning("does not join: the machine is about to go", left_s=notice.left_s)
            await asyncio.sleep(POLL_S)

    async def _look(self) -> Notice | None:
        try:
            text = await asyncio.to_thread(self._fetch if self._url else self._read)
            notice = None if text is None else read(text, wall_ns())
        except (OSError, HTTPException, ValueError, BadInput) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._log.warning("node.notice cannot be read", error=self._trouble)
            return None
        self._trouble = ""
        return notice

    def _read(self) -> str | None:
        try:
            with self._file.open("rb") as file:
                return file.read(LARGEST).decode()
        except FileNotFoundError:
            return None

    def _fetch(self) -> str | None:
        try:
            return _answer(self._url, HEADERS)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            if error.code != 401:
                raise
        return self._fetch_with_token()

    def _fetch_with_token(self) -> str | None:
        token = _answer(urljoin(self._url, TOKEN_PATH), TOKEN_LIFE, "PUT")
        try:
            return _answer(self._url, {TOKEN_HEADER: token})
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise


def _answer(url: str, headers: dict[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=headers, method=method)
    with _NO_PROXY.open(request, timeout=TIMEOUT_S) as answer:
        body: bytes = answer.read(LARGEST)
    return body.decode()
