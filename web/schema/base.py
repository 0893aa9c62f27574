"""The ground of all request schemas: strict types, one form of complaint, and fields that may only be neutral.

Types are JSON's: a boolean is no number, a string is no number, 5.0 is no integer. Names that no schema has are
ignored, because clients send their own; names that would change the answer and are not supported are declared with
`neutral`, and refused unless their value changes nothing.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from common.errors import ErrorCode, RequestError
from common.params import PARAM_RANGES


class RequestSchema(BaseModel):
    """A JSON object that a client sends."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


S = TypeVar("S", bound=RequestSchema)

BRANCH = "~"
"""Begins the names of a union's branches, so that they can be left out of a field's path."""


def complaint(message: str, param: str | None = None) -> PydanticCustomError:
    """Return what a validator raises. param: the field to name when it is not the one being validated."""
    return PydanticCustomError("refused", message, {"param": param})  # type: ignore[arg-type]


def parse(schema: type[S], body: Any) -> S:
    """Return the validated request. Raises RequestError that names the first field that is wrong."""
    if not isinstance(body, dict):
        raise RequestError(ErrorCode.INVALID_REQUEST, "the body must be a JSON object")
    try:
        return schema.model_validate(body)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_input=False)[0]
    path = _path(first)
    # A list of plain values is one field to a client: `stop`, not `stop[0]`; the message says which item.
    param = path[: path.index("[")] if path.count("[") == 1 and path.endswith("]") else path
    raise RequestError(ErrorCode.INVALID_REQUEST, f"{path}: {_message(first)}", param)


def _path(error: ErrorDetails) -> str:
    """Return the path of a field, as in messages[0].content[1].text."""
    context: Mapping[str, Any] = error.get("ctx", {})
    if context.get("param"):
        return str(context["param"])
    path = ""
    for part in error["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(BRANCH):
            path += f".{part}" if path else part
    return path


def _message(error: ErrorDetails) -> str:
    if error["type"] == "refused":
        return error["msg"]
    return _MESSAGES.get(error["type"]) or f"must be {error['msg'].removeprefix('Input should be ')}"


_MESSAGES = {"missing": "is required", "too_short": "must not be empty", "too_long": "has too many items"}
"""Clearer words for some of pydantic's complaints."""


def _whole(text: str) -> str:
    """Refuse half of a surrogate pair, which JSON can spell and nothing can encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise complaint("has half of a surrogate pair in it") from None
    return text


Text = Annotated[str, AfterValidator(_whole)]
"""A string that can be encoded."""


def in_range(name: str) -> FieldInfo:
    """Return the range of a sampling parameter, as the worker knows it."""
    low, high = PARAM_RANGES[name]
    info: FieldInfo = Field(ge=low, le=high)
    return info


def neutral(*values: Any) -> AfterValidator:
    """Return a check that a field of an unsupported kind has one of these values, or null: they change nothing."""

    def check(value: Any) -> Any:
        if value is None or any(_same(value, allowed) for allowed in values):
            return value
        raise complaint("is not supported by this server")

    return AfterValidator(check)


def _same(value: Any, allowed: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are, true and 1 are not."""
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed


Refused = Annotated[Any, neutral()]
"""A field that is known and not supported: only null may be sent."""
