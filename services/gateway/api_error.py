"""The OpenAI API's errors."""

from typing import NoReturn

import msgspec

from shared.errors import BadInput, BusError, CapacityExceeded, LambdaScaleError, NotFound


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
        self.code = code
        self.retry_after = retry_after
        kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.body = msgspec.json.encode({"error": error})


_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def of_error(error: LambdaScaleError) -> ApiError:
    match error:
        case BadInput():
            return ApiError(400, str(error))
        case NotFound():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case CapacityExceeded():
            return ApiError(429, str(error), code="capacity", retry_after=1)
        case BusError():
            return ApiError(503, str(error), code=error.code, retry_after=1)
    return ApiError(500, str(error), code=error.code)


def invalid(param: str, message: str) -> NoReturn:
    raise ApiError(400, f"{param}: {message}", param=param)
