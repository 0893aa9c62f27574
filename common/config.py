"""Configuration: one dataclass per process, each field a setting.

A setting has one name in three spellings: the field `max_batch_tokens`, the flag `--max-batch-tokens` and the variable
`TOKENLOOM_MAX_BATCH_TOKENS`. Flags win over variables, variables over defaults. `cli` builds its flags from these
fields, so a setting is added here and nowhere else. Bad values and unknown TOKENLOOM_ variables are ConfigErrors that
name the key: the setting, or its variable where the value came from there.
"""

import ipaddress
import math
import os
import tempfile
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ConfigError

ENV_PREFIX = "TOKENLOOM_"

Check = Callable[[Any], str | None]
"""Returns what is wrong with a value, or None."""


LARGEST = 2**31 - 1
DAY_S = 24 * 3600


def at_least(low: float, high: float = LARGEST) -> Check:
    """Return a check that a number is not below `low`, nor above `high`, where libraries and the system give up."""

    def check(value: float) -> str | None:
        if value < low:
            return f"must be at least {low}"
        return None if value <= high else f"must be at most {high}"

    return check


def between(low: float, high: float) -> Check:
    """Return a check that a number lies in [low, high]."""
    return lambda value: None if low <= value <= high else f"must be between {low} and {high}"


@dataclass(frozen=True)
class OneOf:
    """The check that a string is one of `allowed`; the command line lists them."""

    allowed: tuple[str, ...]

    def __call__(self, value: Any) -> str | None:
        """Return what is wrong with `value`, or None."""
        return None if value in self.allowed else f"must be one of {', '.join(self.allowed)}"


def one_of(*allowed: str) -> Check:
    """Return a check that a string is one of `allowed`."""
    return OneOf(allowed)


def not_empty(value: str) -> str | None:
    """Check that there is any text."""
    return None if value.strip() else "must not be empty"


def local_endpoint(value: str) -> str | None:
    """Check a ZeroMQ endpoint: ipc://, or tcp:// on a loopback address, because the wire is not encrypted."""
    if value.startswith("ipc://") and len(value) > len("ipc://"):
        path = value.removeprefix("ipc://")
        return None if len(path) < 100 else "the ipc path must be shorter than 100 characters"
    if value.startswith("tcp://"):
        host, _, port = value.removeprefix("tcp://").rpartition(":")
        if not port.isdigit():
            return "must end in :PORT"
        return None if is_loopback(host) else "tcp endpoints must be on a loopback address"
    return "must start with ipc:// or tcp://"


def is_loopback(host: str) -> bool:
    """Return whether a host name or address means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def setting(default: Any, help: str, check: Check | None = None) -> Any:
    """Declare a field of a configuration dataclass. `default` may be a function that is called for each instance."""
    metadata = {"help": help, "check": check}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def runtime_dir() -> Path:
    """Return the folder for this user's sockets; it is created, private, by the process that binds there."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "tokenloom" if base else Path(tempfile.gettempdir()) / f"tokenloom-{os.getuid()}"


def default_cache_dir() -> str:
    """Return the folder for downloads and converted models, outside any checkout."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "tokenloom")


def _submit_endpoint() -> str:
    return f"ipc://{runtime_dir()}/submit.sock"


def _publish_endpoint() -> str:
    return f"ipc://{runtime_dir()}/publish.sock"


@dataclass(frozen=True)
class WireConfig:
    """Where web and worker meet; the same in both."""

    submit_endpoint: str = setting(_submit_endpoint, "ZeroMQ endpoint that requests go to", local_endpoint)
    publish_endpoint: str = setting(_publish_endpoint, "ZeroMQ endpoint that token chunks come from", local_endpoint)
    log_level: str = setting("info", "how much is logged", one_of("debug", "info", "warning", "error"))


@dataclass(frozen=True)
class WorkerConfig(WireConfig):
    """Settings of one worker process."""

    model: str = setting(
        "qwen2.5-coder-0.5b-instruct",
        "what to serve: a catalogue name, a local folder, a .gguf file or a hub id",
        not_empty,
    )
    served_model_name: str = setting("", "name clients use for the model; by default derived from --model")
    cache_dir: str = setting(default_cache_dir, "folder for downloads and converted models")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N; auto takes CUDA where there is one")
    dtype: str = setting(
        "auto",
        "arithmetic of the model; auto is bfloat16 on CUDA and float32 on the CPU",
        one_of("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = setting(
        "auto",
        "how the linear layers are packed on the CPU; auto is int8 where that costs the model under 1 % in perplexity, "
        "else fp16, and none on CUDA",
        one_of("auto", "none", "fp16", "int8"),
    )
    attn_implementation: str = setting("auto", "attention implementation; auto picks one that works on the device")
    continuous_batching: bool = setting(True, "batch many requests in a step; off serves one at a time")
    prefix_caching: bool = setting(True, "reuse the cache blocks of a prompt's prefix that was computed before")
    block_size: int = setting(32, "tokens in a block of the KV cache", between(1, 4096))
    num_blocks: int | None = setting(None, "blocks of the KV cache; by default as many as memory allows", at_least(1))
    max_batch_tokens: int | None = setting(
        None, "tokens computed in one step at most; by default chosen for the device and its memory", at_least(1)
    )
    max_batch_size: int = setting(64, "requests that run in one step at most", between(1, 4096))
    max_model_len: int | None = setting(None, "context length; by default the model's own", at_least(2))
    max_queued_requests: int = setting(1024, "requests that may wait; beyond it they are refused", at_least(1))
    threads: int | None = setting(None, "CPU threads for arithmetic; by default one per core", between(1, 4096))
    trust_remote_code: bool = setting(False, "run Python code that comes with a model")
    allow_pickle: bool = setting(False, "load pickled weights, which can run code")
    heartbeat_interval_s: float = setting(0.25, "seconds between heartbeats", between(0.01, 10))
    subscriber_grace_s: float = setting(
        2.0, "seconds a web process may be gone before its requests are cancelled", at_least(0, DAY_S)
    )
    stuck_limit_s: float = setting(
        30.0, "seconds a web process may take nothing before its requests are cancelled", at_least(0, DAY_S)
    )

    @property
    def cache_path(self) -> Path:
        """The cache folder; a `~` that no shell has replaced is the user's home."""
        return Path(self.cache_dir).expanduser()


@dataclass(frozen=True)
class WebConfig(WireConfig):
    """Settings of the web tier."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one", between(0, 65535))
    web_workers: int = setting(2, "Gunicorn processes", between(1, 256))
    web_worker_class: str = setting("gevent", "Gunicorn worker class", one_of("gevent", "gthread"))
    web_threads: int = setting(64, "threads of a process when the class is gthread", between(1, 4096))
    tokenizer: str = setting("", "folder with tokenizer.json; by default the one the worker names")
    max_body_bytes: int = setting(8 * 1024 * 1024, "size of a request body at most", at_least(1024))
    max_open_requests: int = setting(1024, "requests open in one web process at most", at_least(1))
    heartbeat_timeout_s: float = setting(
        2.0, "seconds without a heartbeat after which the worker counts as gone", at_least(0.1, DAY_S)
    )
    accept_timeout_s: float = setting(
        5.0, "seconds to wait for the worker to accept a request, sending it again meanwhile", at_least(0.1, DAY_S)
    )
    ping_interval_s: float = setting(15.0, "seconds between SSE pings while a stream is silent", at_least(0.05, DAY_S))
    graceful_timeout_s: float = setting(
        10.0, "seconds a stopping web process gives its open requests", at_least(0, DAY_S)
    )


C = TypeVar("C", bound=WireConfig)

_ALL: tuple[type[WireConfig], ...] = (WorkerConfig, WebConfig)


def load(cls: type[C], flags: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None) -> C:
    """Build a configuration from flags (as text or as values; None means not given) and TOKENLOOM_ variables.

    Raises ConfigError for an unknown variable, a value of the wrong type or out of range.
    """
    env = os.environ if env is None else env
    _refuse_unknown_variables(env)
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for f in fields(cls):
        flag = (flags or {}).get(f.name)
        variable = ENV_PREFIX + f.name.upper()
        if flag is not None:
            keys[f.name], values[f.name] = f.name, _parse(f.name, f.name, flag)
        elif env.get(variable, "") != "":
            keys[f.name], values[f.name] = variable, _parse(f.name, variable, env[variable])
    config = cls(**values)
    for f in fields(cls):
        _check(f, keys.get(f.name, f.name), getattr(config, f.name))
    return config


def check_together(worker: WorkerConfig, web: WebConfig) -> None:
    """Raise ConfigError for settings of the two sides that cannot work with each other."""
    if worker.heartbeat_interval_s >= web.heartbeat_timeout_s:
        raise ConfigError(
            "heartbeat_interval_s",
            f"must be shorter than --heartbeat-timeout-s ({web.heartbeat_timeout_s:g}), or a living worker counts as "
            f"gone, not {worker.heartbeat_interval_s:g}",
        )


def to_env(config: WireConfig) -> dict[str, str]:
    """Return the TOKENLOOM_ variables that make `load` give this configuration again in a child process."""
    return {
        ENV_PREFIX + f.name.upper(): str(value)
        for f in fields(config)
        if (value := getattr(config, f.name)) is not None
    }


def known_settings() -> dict[str, type]:
    """Return each setting's name and type (without None)."""
    known: dict[str, type] = {}
    for cls in _ALL:
        hints = typing.get_type_hints(cls)
        known.update({f.name: _plain_type(hints[f.name]) for f in fields(cls)})
    return known


def _refuse_unknown_variables(env: Mapping[str, str]) -> None:
    known = {ENV_PREFIX + name.upper() for name in known_settings()}
    for variable in sorted(env):
        if variable.startswith(ENV_PREFIX) and variable not in known:
            raise ConfigError(variable, "is not a setting of Tokenloom")


def _plain_type(hint: Any) -> type:
    if isinstance(hint, types.UnionType):
        hint = next(arm for arm in hint.__args__ if arm is not type(None))
    plain: type = hint
    return plain


_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

_TYPE_NAMES: dict[type, str] = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


def _parse(name: str, key: str, value: Any) -> Any:
    """Return a value given as text as what it stands for; anything else is returned as it is, for _check to judge."""
    kind = known_settings()[name]
    if not isinstance(value, str) or kind is str:
        return value
    try:
        return _BOOLS[value.strip().lower()] if kind is bool else kind(value)
    except (ValueError, KeyError):
        raise ConfigError(key, f"must be {_TYPE_NAMES[kind]}, not {value!r}") from None


def _check(f: Any, key: str, value: Any) -> None:
    if value is None:
        return
    kind = known_settings()[f.name]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(key, f"must be {_TYPE_NAMES[kind]}, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(key, f"must be a finite number, not {value!r}")
    problem = f.metadata["check"](value) if f.metadata["check"] else None
    if problem:
        raise ConfigError(key, f"{problem}, not {value!r}")
