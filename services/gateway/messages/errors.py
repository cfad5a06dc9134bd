"""Errors as the Messages API has them."""

import msgspec

from services.gateway.api_error import ApiError
from services.gateway.messages.answer_bodies import MessagesError, MessagesErrorDetail

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError, call: str) -> bytes:
    """`call`: the request's id."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return msgspec.json.encode(MessagesError(MessagesErrorDetail(kind, str(error)), call))
