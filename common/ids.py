"""Identifiers. All of them are random, so that none can be guessed and none collides after a restart."""

import re
import secrets

_TOPIC = re.compile(r"p/[0-9a-f]{16}/")


def new_request_id(prefix: str = "req") -> str:
    """Return `<prefix>-<32 hex digits>`; the prefix is cosmetic (`chatcmpl`, `cmpl`, …)."""
    return f"{prefix}-{secrets.token_hex(16)}"


def new_topic() -> str:
    """Return a web process's topic, `p/<16 hex digits>/`.

    Fixed length and a closing slash: ZeroMQ matches topics by prefix, so no topic may be a prefix of another.
    """
    return f"p/{secrets.token_hex(8)}/"


def new_incarnation() -> str:
    """Return the id of one life of a worker process; a restarted worker has another."""
    return secrets.token_hex(8)


def new_seed() -> int:
    """Return a seed for a request that brought none, 63 bits so that msgpack and int64 tensors both hold it."""
    return secrets.randbits(63)


def is_topic(text: str) -> bool:
    """Return whether `text` has the form of a topic."""
    return _TOPIC.fullmatch(text) is not None
