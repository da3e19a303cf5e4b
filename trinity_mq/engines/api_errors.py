"""Errors as HTTP answers, in the form OpenAI clients expect."""

from __future__ import annotations

from typing import Any

from aiohttp import web

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    409: "conflict_error",
}


class ApiError(Exception):
    """An answer other than 200; the message tells the caller how to fix the request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after
        self.extra = extra or {}

    def body(self) -> dict[str, Any]:
        """Return the error in the form of the OpenAI API."""
        return {
            "message": str(self),
            "type": _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error"),
            "param": self.param,
            "code": self.code,
            **self.extra,
        }

    def response(self) -> web.Response:
        """Return the answer with an OpenAI error body."""
        return web.json_response({"error": self.body()}, status=self.status, headers=self.headers())

    def headers(self) -> dict[str, str]:
        """Return the headers of the answer."""
        return {} if self.retry_after is None else {"Retry-After": f"{self.retry_after:g}"}


def bad_request(message: str, param: str | None = None, code: str | None = None, **extra: Any) -> ApiError:
    """Return the error for a 400 answer."""
    return ApiError(400, message, code=code, param=param, extra=extra)


def not_current(message: str) -> ApiError:
    """Return the 503 error of an engine that cannot serve a model now, such as before its first committed weights."""
    return ApiError(503, message, code="engine_not_current", retry_after=1.0)


def stopping() -> ApiError:
    """Return the 503 error of an engine that shuts down."""
    return ApiError(503, "the engine is shutting down; use another", code="engine_stopping", retry_after=1.0)
