"""The ASGI application: routes, the key check, and every error in OpenAI's form."""

from __future__ import annotations

import hmac

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.api import info, tokens
from serving.api.chat import chat_completions
from serving.api.completions import completions
from serving.api.errors import ApiError, failed
from serving.api.state import ServerState
from serving.metrics import ServerMetrics


def build_app(state: ServerState) -> ASGIApp:
    """Return the application that serves `state`."""
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", info.list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", info.get_model, methods=["GET"]),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
            Route("/reset_prefix_cache", info.reset_prefix_cache, methods=["POST"]),
            Route("/health", info.health, methods=["GET"]),
            Route("/ready", info.ready, methods=["GET"]),
            Route("/metrics", info.metrics, methods=["GET"]),
            Route("/version", info.show_version, methods=["GET"]),
            Route("/server_info", info.server_info, methods=["GET"]),
        ],
        exception_handlers={
            ApiError: _api_error,
            404: info.not_found,
            405: info.method_not_allowed,
            Exception: _unexpected,
        },
    )
    app.state.server = state
    return app if state.config.api_key is None else KeyCheck(app, state.config.api_key, state.metrics)


class KeyCheck:
    """Demands the bearer token on every path but /health, unknown ones included.

    Plain ASGI: a middleware that wraps responses would hide the client's disconnect from them.
    """

    def __init__(self, app: ASGIApp, api_key: str, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = ApiError(
                    "The API key is missing or wrong. Send it as `Authorization: Bearer KEY`.",
                    status=401,
                    type="authentication_error",
                    code="invalid_api_key",
                )
                self._metrics.count_http_error(error.status)
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), error
    request.app.state.server.metrics.count_http_error(error.status)
    return error.response()


async def _unexpected(request: Request, _error: Exception) -> Response:
    # Starlette raises it again after this answer, so the log has the traceback.
    request.app.state.server.metrics.count_http_error(500)
    return failed("Internal error; the server's log has the details.", "internal_error").response()
