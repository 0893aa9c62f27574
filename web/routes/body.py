"""The body of a request: bytes to a JSON value, or a 400 that says what is wrong with them.

The content type is not asked: what parses as JSON is meant as JSON, and `curl -d` sends none of its own.
"""

import json
from typing import Any

from flask import request
from werkzeug.exceptions import RequestEntityTooLarge

from common.errors import ErrorCode, RequestError


def read_json() -> Any:
    """Return the JSON value in the current request's body. Raises RequestError, or RequestEntityTooLarge (413)."""
    body = request.get_data(cache=False)
    limit = request.max_content_length
    if request.content_length is None and limit is not None and len(body) >= limit:
        raise RequestEntityTooLarge  # a body without a length was only read this far
    return parse_json(body)


def parse_json(body: bytes) -> Any:
    """Return the JSON value in some bytes. Raises RequestError."""
    if not body.strip():
        raise _bad("the body is empty; it must be a JSON object")
    try:
        return _DECODER.decode(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise _bad("the body is not UTF-8") from None
    except RecursionError:
        raise _bad("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _bad(f"the body is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    except ValueError as error:  # NaN, or an integer of thousands of digits
        raise _bad(f"the body is not JSON: {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _bad(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, message)
