"""Error codes that cross the wire and the HTTP boundary, and the exception tree.

One table says for each code which HTTP status and OpenAI error type it becomes, and whether trying again can help.
"""

from dataclasses import dataclass
from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a request failed. The value is the `code` a client sees."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    NOT_READY = "not_ready"
    WORKER_LOST = "worker_lost"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    UNKNOWN_REQUEST = "unknown_request"
    INTERNAL_ERROR = "internal_error"


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How one code looks over HTTP: status, OpenAI error `type`, and whether a retry can succeed."""

    status: int
    type: str
    retryable: bool


ERROR_KINDS: dict[ErrorCode, ErrorKind] = {
    ErrorCode.INVALID_REQUEST: ErrorKind(400, "invalid_request_error", False),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: ErrorKind(400, "invalid_request_error", False),
    ErrorCode.MODEL_NOT_FOUND: ErrorKind(404, "invalid_request_error", False),
    ErrorCode.QUEUE_FULL: ErrorKind(429, "rate_limit_error", True),
    ErrorCode.DRAINING: ErrorKind(503, "service_unavailable_error", True),
    ErrorCode.NOT_READY: ErrorKind(503, "service_unavailable_error", True),
    ErrorCode.WORKER_LOST: ErrorKind(503, "service_unavailable_error", True),
    ErrorCode.DEADLINE_EXCEEDED: ErrorKind(504, "timeout_error", True),
    ErrorCode.UNKNOWN_REQUEST: ErrorKind(503, "service_unavailable_error", True),
    ErrorCode.INTERNAL_ERROR: ErrorKind(500, "server_error", False),
}


class TokenloomError(Exception):
    """Root of the project's own exceptions."""


class RequestError(TokenloomError):
    """One request cannot be served; carries what the client is told.

    `param` names the offending field when there is one.
    """

    def __init__(self, code: ErrorCode, message: str, param: str | None = None):
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    @property
    def kind(self) -> ErrorKind:
        """The HTTP view of this error."""
        return ERROR_KINDS[self.code]


class ConfigError(TokenloomError):
    """Configuration that stops the start; `key` is the setting's name."""

    def __init__(self, key: str, message: str):
        super().__init__(f"{key}: {message}")
        self.key = key


class WireError(TokenloomError):
    """A wire message that is malformed, oversized or of another version. It is counted and dropped, never fatal."""


class ModelError(TokenloomError):
    """A model that cannot be found, fetched, converted or loaded; the message says what to do next."""
