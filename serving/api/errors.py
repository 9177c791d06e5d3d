"""Errors that reach a client, in OpenAI's form."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response


class ApiError(Exception):
    """A request that ends with an HTTP error. `param` names the field to correct."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The error object; the same in a response and in the middle of a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {"Retry-After": str(self.retry_after_s)} if self.retry_after_s is not None else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body(), status=self.status, headers=headers)


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """A field that cannot be served: 400 with `param`."""
    return ApiError(message, param=param, code=code)


def unavailable(message: str, code: str, retry_after_s: int = 5) -> ApiError:
    """The server cannot take requests now: 503 with Retry-After."""
    return ApiError(message, status=503, type="server_error", code=code, retry_after_s=retry_after_s)


def busy(message: str) -> ApiError:
    """Too many requests wait already: 429 with Retry-After."""
    return ApiError(message, status=429, type="rate_limit_error", code="queue_full", retry_after_s=1)


def failed(message: str, code: str = "generation_failed") -> ApiError:
    """The server accepted the request and could not finish it: 500."""
    return ApiError(message, status=500, type="server_error", code=code)


def json_response(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status_code=status, headers=headers, media_type="application/json")
