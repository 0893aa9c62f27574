"""Checks of values that come over the wire: each returns the value, or raises ValueError or TypeError.

A check is a function of one value; most of these make one.
"""

import math
from collections.abc import Callable
from typing import Any

MAX_TOKEN_ID = 2**31 - 1

Check = Callable[[Any], Any]


def text(limit: int) -> Check:
    """Return a check for strings of at most `limit` characters."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or len(value) > limit:
            raise ValueError(f"expected a string of at most {limit} characters")
        return value

    return check


def integer(low: int, high: int) -> Check:
    """Return a check for integers of a range, its ends included."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"expected an integer between {low} and {high}")
        return value

    return check


def number(value: Any) -> float:
    """Check for a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError("expected a finite number")
    return float(value)


def boolean(value: Any) -> bool:
    """Check for true or false."""
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def optional(check: Check) -> Check:
    """Return a check that lets None pass."""
    return lambda value: None if value is None else check(value)


def list_of(check: Check, limit: int) -> Check:
    """Return a check for lists of at most `limit` items."""

    def check_list(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) > limit:
            raise ValueError(f"expected a list of at most {limit} items")
        return [check(item) for item in value]

    return check_list


def token_ids(limit: int) -> Check:
    """Like `list_of(integer(...))`, but fast enough for prompts of a million tokens."""

    def check(value: Any) -> list[int]:
        if not isinstance(value, list) or len(value) > limit:
            raise ValueError(f"expected a list of at most {limit} token ids")
        if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_TOKEN_ID):
            raise ValueError("expected token ids")
        return value

    return check


def map_of(check: Check, limit: int) -> Check:
    """Return a check for maps of at most `limit` named items."""

    def check_map(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > limit or not all(isinstance(key, str) for key in value):
            raise ValueError(f"expected a map of at most {limit} named items")
        return {key: check(item) for key, item in value.items()}

    return check_map


def scalar(value: Any) -> Any:
    """Check for what fits into a map of details."""
    if value is not None and not isinstance(value, (str, int, float, bool)):
        raise ValueError("expected a scalar")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value


def one_of(*allowed: str) -> Check:
    """Return a check for some strings."""

    def check(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return str(value)

    return check
