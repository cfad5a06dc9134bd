"""aiohttp's own log, without what is no error of the gateway."""

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError


def _is_ours(record: logging.LogRecord) -> bool:
    """A request that is no HTTP, or whose body is not what its encoding says, is answered with 400.
    aiohttp writes where it was read, too: some thirty lines for each, and anybody can send as many
    as they want."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


SERVER_LOG = logging.getLogger("aiohttp.server.gateway")
SERVER_LOG.addFilter(_is_ours)
