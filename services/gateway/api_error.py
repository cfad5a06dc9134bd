"""The OpenAI API's errors."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import msgspec

from services.gateway.answer_bodies import ErrorAnswer, ErrorDetail
from services.gateway.core.keyed import KeyReused
from shared.errors import (
    BadInput,
    BusError,
    CapacityExceeded,
    Conflict,
    LambdaScaleError,
    NotFound,
    RequestKillsNodes,
)

MOST_SECONDS = 600
"""The longest time for which a client is sent away."""


class ApiError(Exception):
    """An answer other than 200, with the API's error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after
        kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        detail = ErrorDetail(message=message, type=kind, param=param, code=code)
        self.body = msgspec.json.encode(ErrorAnswer(detail))


_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def of_error(error: LambdaScaleError) -> ApiError:
    match error:
        case KeyReused():
            return ApiError(422, str(error), param="Idempotency-Key", code=error.code)
        case RequestKillsNodes():  # no 5xx: clients would send those again by themselves
            return ApiError(422, str(error), code=error.code)
        case BadInput():
            return ApiError(400, str(error))
        case NotFound():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case CapacityExceeded():
            return ApiError(429, str(error), code=error.code, retry_after=_seconds(error))
        case Conflict():
            return ApiError(409, str(error), code="conflict")
        case BusError():
            return ApiError(503, str(error), code=error.code, retry_after=1)
    return ApiError(500, str(error), code=error.code)


def _seconds(error: CapacityExceeded) -> int:
    """For `Retry-After`, in whole seconds."""
    return max(1, min(math.ceil(error.retry_after_s or 1), MOST_SECONDS))


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors that are raised inside name the fields of another API. `names`: by our names. Where
    in a field something is wrong is left out: it may lie elsewhere there."""
    try:
        yield
    except ApiError as error:
        param = names.get(re.split(r"[.\[]", error.param or "")[0])
        if param is None:
            raise
        message = str(error).replace(f"{error.param}: ", f"{param}: ", 1)
        raise ApiError(
            error.status, message, param=param, code=error.code, retry_after=error.retry_after
        ) from error


def invalid(param: str, message: str) -> NoReturn:
    raise ApiError(400, f"{param}: {message}", param=param)
