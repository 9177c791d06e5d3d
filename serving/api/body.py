"""Read a request body: bounded, valid UTF-8, valid JSON, of the right shape."""

from __future__ import annotations

import re

import msgspec
from starlette.requests import ClientDisconnect, Request

from serving.api.errors import ApiError, invalid
from serving.api.wire import Body

_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)


# Closing a connection with unread data resets it, and the client would see that instead of the 413. So a body that is
# too long is read and dropped up to this many times the limit.
LINGER = 4


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the whole body; never more than `max_bytes` of it are held.

    Raises:
        ApiError: 413 when the body is longer than `max_bytes`.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > LINGER * max_bytes:
        raise _too_large(max_bytes)
    body, num_bytes = bytearray(), 0
    try:
        async for piece in request.stream():
            num_bytes += len(piece)
            if num_bytes <= max_bytes:
                body += piece
            elif num_bytes > LINGER * max_bytes:
                break
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
    except ClientDisconnect:
        raise ApiError("The client closed the connection.", status=499, code="client_closed_request") from None
    return bytes(body)


def decode_body[BodyType: Body](body: bytes, kind: type[BodyType]) -> BodyType:
    """Decode strictly.

    Raises:
        ApiError: 400 that names the first wrong field in `param`, or says why the body is no JSON.
    """
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(f"The body is not valid UTF-8 (byte {error.start}). Send JSON encoded as UTF-8.") from None
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _shape_error(str(error)) from None
    except msgspec.DecodeError as error:
        # NaN and Infinity end here too: they are not JSON.
        raise ApiError(f"The body is not valid JSON: {error}.{_surrogate_hint(body)}") from None
    except RecursionError:
        raise ApiError("The body is nested too deeply. Send a flatter document.") from None


def _surrogate_hint(body: bytes) -> str:
    """msgspec calls half of a surrogate pair truncated data."""
    if _SURROGATE.search(body) is None:
        return ""
    return r" It has a \uD8xx to \uDFxx escape: such escapes come in pairs, high then low."


def _shape_error(message: str) -> ApiError:
    match = _PATH.match(message)
    what, path = (match["what"], match["path"] or "") if match else (message, "")
    if unknown := _UNKNOWN.match(what):
        param = _join(path, unknown["name"])
        return invalid(param, f"{param} is not a field that this server supports. Leave it out.", "unknown_field")
    if missing := _MISSING.match(what):
        param = _join(path, missing["name"])
        return invalid(param, f"{param} is required. Add it.", "missing_field")
    if not path:
        return ApiError(f"The body is not of the right shape: {what}. Send a JSON object.")
    return invalid(path, f"{path} is not of the right type: {what}.", "invalid_type")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        f"The body is larger than {max_bytes} bytes. Send less, or start the server with a larger --max-body-mb.",
        status=413,
        code="body_too_large",
    )
