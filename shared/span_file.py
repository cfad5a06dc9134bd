"""Spans in a JSON-lines file, written by a thread: a slow disk never holds up an event loop."""

import fcntl
import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import TextIO

import structlog
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

LARGEST = 256 << 20
"""Bytes after which a file is put aside, as `<name>.old.jsonl`, and another begun."""
WRITE_EVERY_S = 0.1
"""At most so much later than it ended, a span is written. What SIGKILL takes is no older."""
STOP_S = 10.0
"""How long the end of the process waits for a disk that hangs."""


def _own(path: Path) -> TextIO:
    """The first of these files that no other process has open for spans. Its lock ends with this
    process."""
    for number in count(1):
        file = (path if number == 1 else path.with_stem(f"{path.stem}-{number}")).open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        except OSError:
            pass  # a file system without locks
        return file
    raise AssertionError("numbers do not end")


class SpanFile(SpanProcessor):
    """Appends one JSON object for each finished span, in the order in which they ended, in batches.
    The file can be read while the process runs.

    The queue has no bound, so no span is dropped: a span takes about 2 kB of memory until it is
    written, and a process ends far fewer of them than a disk can take. Spans that end after
    `shutdown` are not written.
    """

    def __init__(self, path: Path) -> None:
        """Where another process writes to `path`, as a standby does, the file is `<name>-2.jsonl`,
        and so on."""
        self._file = _own(path)
        self._ended: SimpleQueue[ReadableSpan | None] = SimpleQueue()
        """None comes last, after all that ended before `shutdown`."""
        self._stopping = threading.Event()
        self._writer = threading.Thread(target=self._run, name="span-file", daemon=True)
        self._writer.start()

    def on_end(self, span: ReadableSpan) -> None:
        self._ended.put(span)

    def shutdown(self) -> None:
        self._stopping.set()
        self._ended.put(None)
        self._writer.join(STOP_S)

    def _run(self) -> None:
        going_on = True
        while going_on:
            batch = self._batch()
            going_on = None not in batch
            self._write([span for span in batch if span is not None])
        with suppress(OSError):  # what could not be written was logged
            self._file.close()

    def _batch(self) -> list[ReadableSpan | None]:
        """The next span, and those that end soon after it."""
        first = self._ended.get()
        self._stopping.wait(WRITE_EVERY_S)
        return [first, *(self._ended.get() for _ in range(self._ended.qsize()))]

    def _write(self, spans: Sequence[ReadableSpan]) -> None:
        try:
            self._file.write("".join(json.dumps(_as_json(span)) + "\n" for span in spans))
            self._file.flush()
            if self._file.tell() > LARGEST:
                self._begin_anew()
        except Exception:  # whatever it was, later spans are still wanted
            log = structlog.get_logger(role="telemetry", path=self._file.name)
            log.exception("spans could not be written", spans=len(spans))

    def _begin_anew(self) -> None:
        path = Path(self._file.name)
        path.replace(path.with_stem(f"{path.stem}.old"))
        self._file.close()
        self._file = _own(path)


def _as_json(span: ReadableSpan) -> dict[str, object]:
    context = span.get_span_context()
    if context is None:
        raise ValueError("a finished span has a context")
    return {
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else None,
        "name": span.name,
        "service": span.resource.attributes.get("service.name"),
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "attributes": dict(span.attributes or {}),
        "links": [
            f"{link.context.trace_id:032x}-{link.context.span_id:016x}" for link in span.links
        ],
        "error": span.status.description if not span.status.is_ok else None,
    }
