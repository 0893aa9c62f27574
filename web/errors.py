"""What a client is told when something is wrong: OpenAI's error object, for every status.

Handlers for the application. A fault of the server's own is logged with its trace; what a client sent is never logged.
"""

import logging
from typing import Any

from flask import Flask, Response, g
from werkzeug.exceptions import HTTPException

from common.errors import ErrorCode, RequestError
from web.answers import json_bytes
from web.link.call import ClientGone

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1

CLIENT_CLOSED_REQUEST = 499
"""nginx's number for a client that left before its answer; nobody reads it."""


def error_json(error: RequestError) -> dict[str, Any]:
    """Return OpenAI's error object."""
    return _object(error.message, error.kind.type, error.param, str(error.code))


def error_response(error: RequestError) -> Response:
    """Return the response for a request that cannot be served."""
    response = Response(json_bytes(error_json(error)), error.kind.status, mimetype="application/json")
    if error.kind.retryable:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def register(app: Flask) -> None:
    """Have every error of the application answered in this form."""
    app.register_error_handler(RequestError, error_response)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(ClientGone, lambda _: Response(status=CLIENT_CLOSED_REQUEST))
    app.register_error_handler(Exception, _unexpected)


def _object(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _http_error(error: HTTPException) -> Response:
    status = error.code or 500
    code = error.name.lower().replace(" ", "_")
    kind = "invalid_request_error" if status < 500 else "server_error"
    response = Response(
        json_bytes(_object(error.description or error.name, kind, None, code)), status, mimetype="application/json"
    )
    for name, value in error.get_headers():
        if name != "Content-Type":  # Allow, with a wrong method
            response.headers[name] = value
    return response


def _unexpected(error: Exception) -> Response:
    log.error("%s failed", g.get("request_id"), exc_info=error)
    return error_response(RequestError(ErrorCode.INTERNAL_ERROR, "the server failed to answer"))
