"""The endpoints that tell about the server: models, health, readiness, metrics, version, configuration."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serving.api.errors import ApiError, json_response
from serving.api.respond import check_model
from serving.api.state import ServerState
from serving.config import DEVICE_SETTINGS, DRAFT_SETTINGS
from serving.metrics import CONTENT_TYPE


def version() -> str:
    """The installed version, or `unknown` in a source tree that was never installed."""
    try:
        return importlib.metadata.version("k3jax")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


async def list_models(request: Request) -> Response:
    """GET /v1/models."""
    return json_response({"object": "list", "data": [_model(_state(request))]})


async def get_model(request: Request) -> Response:
    """GET /v1/models/{name}."""
    state = _state(request)
    check_model(request.path_params["name"], state)
    return json_response(_model(state))


async def health(request: Request) -> Response:
    """GET /health: the process is alive. 503 only when nothing but a restart helps."""
    phase = _state(request).phase
    is_alive = phase not in ("failed", "stopped")
    return json_response({"status": "alive" if is_alive else phase}, status=200 if is_alive else 503)


async def ready(request: Request) -> Response:
    """GET /ready: 200 when requests are served at full speed, else 503 with the reason."""
    state = _state(request)
    phase = state.phase
    if phase == "ready":
        return json_response({"status": "ready"})
    reasons = {
        "recovering": "the device failed; its state is being rebuilt, requests wait",
        "draining": "the server is shutting down",
    }
    body = {"status": phase, "reason": reasons.get(phase, state.reason)}
    return json_response(body, status=503, headers={"Retry-After": "5"})


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    return Response(_state(request).metrics.render(), media_type=None, headers={"Content-Type": CONTENT_TYPE})


async def reset_prefix_cache(request: Request) -> Response:
    """POST /reset_prefix_cache: forget all cached prefixes before the next step. Running requests go on."""
    _state(request).require_backend().engine.reset_prefix_cache()
    return json_response({"status": "reset"})


async def show_version(request: Request) -> Response:
    """GET /version."""
    return json_response({"version": version()})


async def server_info(request: Request) -> Response:
    """GET /server_info: the configuration as given, and what is in effect."""
    state = _state(request)
    body: dict[str, Any] = {
        "version": version(),
        "status": state.phase,
        "model": state.config.served_name,
        "config": state.config.public(),
    }
    if state.backend is not None:
        engine = state.backend.engine
        body["effective"] = effective_values(state)
        body["device"] = {name: fact for name, fact in engine.info().items() if name != "settings"}
        body["step_costs"] = [cost._asdict() for cost in state.backend.limits.step_costs]
        body["stats"] = dataclasses.asdict(engine.stats())
    return json_response(body)


def effective_values(state: ServerState) -> dict[str, Any]:
    """What every flag came to, under its own name, and the limits that no flag sets. None: nothing depends on it."""
    if state.backend is None:
        return {}
    config, limits = state.config, state.backend.limits
    values = config.public() | {"served_model_name": config.served_name}
    reserved = config.reserve_draft_slots
    chosen = state.backend.engine.info().get("settings")
    values |= chosen if isinstance(chosen, dict) else dict.fromkeys(DEVICE_SETTINGS + DRAFT_SETTINGS)
    return values | {
        "max_num_seqs": limits.num_rows,
        "max_step_tokens": limits.max_step_tokens,
        "max_model_len": limits.max_model_len,
        "num_pages": limits.num_pages,
        "num_slots": limits.num_slots,
        "reserve_draft_slots": limits.draft_tokens if reserved is None else reserved,
        "draft_tokens": limits.draft_tokens or None,
        "page_size": limits.page_size,
        "vocab_size": limits.vocab_size,
        "max_logit_bias": limits.max_logit_bias,
        "max_logprobs": limits.max_logprobs,
        "max_stop_token_ids": limits.max_stop_token_ids,
    }


def chosen_values(state: ServerState) -> dict[str, Any]:
    """Those of `effective_values` that the flags, as given, do not say, and all about drafts."""
    given = {name: value for name, value in state.config.public().items() if name not in ("draft", *DRAFT_SETTINGS)}
    values = effective_values(state).items()
    return {name: value for name, value in values if value is not None and value != given.get(name)}


async def not_found(request: Request, _error: Exception) -> Response:
    """Any other path."""
    _state(request).metrics.count_http_error(404)
    message = f"There is no {request.method} {request.url.path} here. docs/operations.md lists the endpoints."
    return ApiError(message, status=404, code="not_found").response()


async def method_not_allowed(request: Request, _error: Exception) -> Response:
    """A known path with the wrong method."""
    _state(request).metrics.count_http_error(405)
    message = f"{request.url.path} does not take {request.method}. docs/operations.md lists the endpoints."
    return ApiError(message, status=405, code="method_not_allowed").response()


def _state(request: Request) -> ServerState:
    return request.app.state.server


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.config.served_name,
        "object": "model",
        "created": state.created,
        "owned_by": "k3jax",
        "root": state.config.model,
        "max_model_len": None if state.backend is None else state.backend.limits.max_model_len,
    }
