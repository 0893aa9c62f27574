"""The messages between web and worker: dataclasses, and their msgpack form.

A message is a msgpack map of names, never positions, with its version `v` and its type `t`. Decoding checks every
field's type and bound and raises WireError for anything else, so that what leaves this module can be trusted. Names
that are not known are ignored; another version is refused. Never pickle.

`pos` makes every event idempotent: it is the index, among the request's generated tokens, at which the event's ids
start. `seq` grows by one with each batch of a topic within one incarnation of the worker, so a gap can be seen.
"""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import msgpack

from common import checks
from common.errors import ErrorCode, RequestError, WireError
from common.ids import is_topic
from common.params import SamplingParams

VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_TOKENS = 16 * 1024 * 1024
MAX_LOGPROBS = 20
"""Likeliest tokens that are told at each place, at most; OpenAI's bound."""


def _params(value: Any) -> SamplingParams:
    if not isinstance(value, dict):
        raise ValueError("expected a map")
    known = {f.name for f in fields(SamplingParams)}
    params = SamplingParams(**{key: _tuples(item) for key, item in value.items() if key in known})
    problem = params.problem()
    if problem:
        raise ValueError(f"{problem[0]} {problem[1]}")
    return params


def _tuples(value: Any) -> Any:
    """Return a list, and lists in it, as tuples."""
    if not isinstance(value, list):
        return value
    return tuple(tuple(item) if isinstance(item, list) else item for item in value)


def _topic(value: Any) -> str:
    if not isinstance(value, str) or not is_topic(value):
        raise ValueError("expected a topic")
    return value


_REQUEST_ID = checks.text(128)
_COUNT = checks.integer(0, 2**53)


def _wire(check: checks.Check, **kwargs: Any) -> Any:
    return field(metadata={"check": check}, **kwargs)


# --- events: what happened to one request -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `cached_tokens` of the prompt were found in the prefix cache."""

    prompt_tokens: int = _wire(_COUNT)
    completion_tokens: int = _wire(_COUNT)
    cached_tokens: int = _wire(_COUNT, default=0)


@dataclass(frozen=True, slots=True)
class Timings:
    """Where one request's time went, in seconds, by the worker's monotonic clock."""

    queue_s: float = _wire(checks.number, default=0.0)
    prefill_s: float = _wire(checks.number, default=0.0)
    decode_s: float = _wire(checks.number, default=0.0)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The worker has taken the request: from here on exactly one `Finished` or `Failed` follows."""

    TYPE: ClassVar[str] = "accepted"
    id: str = _wire(_REQUEST_ID)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities by the model's own logits: of one token, and of the likeliest ones in its place."""

    logprob: float = _wire(checks.number)
    top_ids: list[int] = _wire(checks.token_ids(MAX_LOGPROBS), default_factory=list)
    top_logprobs: list[float] = _wire(checks.list_of(checks.number, MAX_LOGPROBS), default_factory=list)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Generated token ids; `pos` is the index of the first among all the tokens generated for this request.

    logprobs: one for each id when they were asked for, else empty.
    """

    TYPE: ClassVar[str] = "tokens"
    id: str = _wire(_REQUEST_ID)
    pos: int = _wire(_COUNT)
    ids: list[int] = _wire(checks.token_ids(MAX_TOKENS))
    logprobs: list[Logprobs] = _wire(
        checks.list_of(lambda value: _unpack(Logprobs, value), MAX_TOKENS), default_factory=list
    )

    def __post_init__(self) -> None:
        if self.logprobs and len(self.logprobs) != len(self.ids):
            raise ValueError("logprobs must be as many as ids")

    def since(self, pos: int) -> "Tokens":
        """Return what follows from index `pos` on."""
        known = pos - self.pos
        return self if not known else Tokens(self.id, pos, self.ids[known:], self.logprobs[known:])


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens after the first, all at once, before the first generated token."""

    TYPE: ClassVar[str] = "prompt_logprobs"
    id: str = _wire(_REQUEST_ID)
    logprobs: list[Logprobs] = _wire(checks.list_of(lambda value: _unpack(Logprobs, value), MAX_TOKENS))


@dataclass(frozen=True, slots=True)
class Finished:
    """Terminal: the request ended as asked. `reason` is `stop`, `length` or `cancelled`."""

    TYPE: ClassVar[str] = "finished"
    id: str = _wire(_REQUEST_ID)
    reason: str = _wire(checks.one_of("stop", "length", "cancelled"))
    usage: Usage = _wire(lambda value: _unpack(Usage, value))
    timings: Timings = _wire(lambda value: _unpack(Timings, value), default_factory=Timings)


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal: the request was refused or broke. `code` is an ErrorCode."""

    TYPE: ClassVar[str] = "failed"
    id: str = _wire(_REQUEST_ID)
    code: ErrorCode = _wire(ErrorCode)
    message: str = _wire(checks.text(4096))
    retryable: bool = _wire(checks.boolean, default=False)

    @classmethod
    def of(cls, request_id: str, error: RequestError) -> "Failed":
        """Return the event that ends a request with this error."""
        return cls(request_id, error.code, error.message, error.kind.retryable)


Event = Accepted | PromptLogprobs | Tokens | Finished | Failed
_EVENTS: dict[str, type[Any]] = {cls.TYPE: cls for cls in (Accepted, PromptLogprobs, Tokens, Finished, Failed)}


def _event(value: Any) -> Event:
    if not isinstance(value, dict) or value.get("t") not in _EVENTS:
        raise ValueError("unknown event")
    event: Event = _unpack(_EVENTS[value["t"]], value)
    return event


# --- messages -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """web → worker: run this prompt. Repeating one is harmless: a known id is answered with what it already has.

    deadline: Unix time in seconds, or None; no worker looks at it yet. grammar: refused when set. generated_ids: the
    tokens that a resumed request already has. num_logprobs: None, or how many of the likeliest tokens are told with
    each generated one (0: only its own log-probability). prompt_logprobs: whether the prompt's tokens are told the same
    way; its prefix is then computed even if it is cached.
    """

    TYPE: ClassVar[str] = "submit"
    id: str = _wire(_REQUEST_ID)
    topic: str = _wire(_topic)
    prompt_ids: list[int] = _wire(checks.token_ids(MAX_TOKENS))
    params: SamplingParams = _wire(_params)
    max_tokens: int = _wire(checks.integer(1, MAX_TOKENS))
    stop_token_ids: list[int] = _wire(checks.token_ids(1024), default_factory=list)
    ignore_eos: bool = _wire(checks.boolean, default=False)
    priority: int = _wire(checks.integer(-(2**31), 2**31 - 1), default=0)
    tenant: str = _wire(checks.text(256), default="")
    deadline: float | None = _wire(checks.optional(checks.number), default=None)
    grammar: str | None = _wire(checks.optional(checks.text(1024 * 1024)), default=None)
    generated_ids: list[int] = _wire(checks.token_ids(MAX_TOKENS), default_factory=list)
    num_logprobs: int | None = _wire(checks.optional(checks.integer(0, MAX_LOGPROBS)), default=None)
    prompt_logprobs: bool = _wire(checks.boolean, default=False)


@dataclass(frozen=True, slots=True)
class Cancel:
    """web → worker: end this request. Idempotent; the id is matched exactly; an unknown id is no error."""

    TYPE: ClassVar[str] = "cancel"
    id: str = _wire(_REQUEST_ID)
    reason: str = _wire(checks.text(256), default="")


@dataclass(frozen=True, slots=True)
class Have:
    """How many generated tokens of one request a web process has."""

    id: str = _wire(_REQUEST_ID)
    have: int = _wire(_COUNT)


@dataclass(frozen=True, slots=True)
class Resync:
    """web → worker: something was missed on this topic; send again what follows for these requests."""

    TYPE: ClassVar[str] = "resync"
    topic: str = _wire(_topic)
    incarnation: str = _wire(checks.text(64))
    requests: list[Have] = _wire(checks.list_of(lambda value: _unpack(Have, value), 1_000_000))


@dataclass(frozen=True, slots=True)
class Batch:
    """worker → one topic, at most one a step."""

    TYPE: ClassVar[str] = "batch"
    incarnation: str = _wire(checks.text(64))
    seq: int = _wire(checks.integer(1, 2**53))
    events: list[Event] = _wire(checks.list_of(_event, 1_000_000))


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model and its limits. `path` is the local folder with tokenizer.json, config and chat template."""

    id: str = _wire(checks.text(1024))
    path: str = _wire(checks.text(4096))
    max_model_len: int = _wire(_COUNT)
    vocab_size: int = _wire(_COUNT)
    eos_token_ids: list[int] = _wire(checks.token_ids(1024), default_factory=list)
    details: dict[str, Any] = _wire(checks.map_of(checks.scalar, 64), default_factory=dict)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """worker → every subscribed topic, every 250 ms, from the io thread.

    state: `loading`, `ready` or `draining`. seq: the last batch sequence number of the topic it is sent to, so that
    a lost last batch is seen too. step: steps run so far; step_age_s: how long the step in flight has been running,
    0 when idle. counters: monotonic totals.
    """

    TYPE: ClassVar[str] = "heartbeat"
    incarnation: str = _wire(checks.text(64))
    state: str = _wire(checks.one_of("loading", "ready", "draining"))
    seq: int = _wire(_COUNT)
    model: ModelInfo | None = _wire(checks.optional(lambda value: _unpack(ModelInfo, value)))
    step: int = _wire(_COUNT)
    step_age_s: float = _wire(checks.number)
    running: int = _wire(_COUNT)
    waiting: int = _wire(_COUNT)
    kv_blocks_used: int = _wire(_COUNT)
    kv_blocks_total: int = _wire(_COUNT)
    counters: dict[str, int] = _wire(checks.map_of(_COUNT, 256), default_factory=dict)


ToWorker = Submit | Cancel | Resync
ToWeb = Batch | Heartbeat
Message = ToWorker | ToWeb
_TO_WORKER: dict[str, type[Any]] = {cls.TYPE: cls for cls in (Submit, Cancel, Resync)}
_TO_WEB: dict[str, type[Any]] = {cls.TYPE: cls for cls in (Batch, Heartbeat)}

T = TypeVar("T")


def encode(message: Message) -> bytes:
    """Return the msgpack form of a message."""
    packed: bytes = msgpack.packb({"v": VERSION, **_pack(message)}, use_bin_type=True)
    return packed


def decode_to_worker(data: bytes) -> ToWorker:
    """Decode what a worker may receive. Raises WireError."""
    message: ToWorker = _decode(data, _TO_WORKER)
    return message


def decode_to_web(data: bytes) -> ToWeb:
    """Decode what a web process may receive. Raises WireError."""
    message: ToWeb = _decode(data, _TO_WEB)
    return message


def _decode(data: bytes, types: dict[str, type[Any]]) -> Any:
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        raw = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except Exception as error:  # noqa: BLE001  msgpack raises many kinds, ValueError and its own among them
        raise WireError(f"not msgpack: {error}") from None
    if not isinstance(raw, dict):
        raise WireError("not a map")
    if raw.get("v") != VERSION:
        raise WireError(f"version {raw.get('v')!r} is not {VERSION}")
    kind = raw.get("t")
    if not isinstance(kind, str) or kind not in types:
        raise WireError("unknown message type")
    try:
        return _unpack(types[kind], raw)
    except (ValueError, TypeError) as error:
        raise WireError(f"{kind}: {error}") from None


def _pack(value: Any) -> Any:
    """Turn a message into what msgpack takes: maps of its fields, with `t` for those that have a type."""
    if isinstance(value, list):
        # Lists of token ids are the bulk of the traffic and need no walk.
        return value if not value or isinstance(value[0], int) else [_pack(item) for item in value]
    if not hasattr(value, "__dataclass_fields__"):
        return str(value) if isinstance(value, ErrorCode) else value
    packed = {f.name: _pack(getattr(value, f.name)) for f in fields(value)}
    kind = getattr(value, "TYPE", None)
    return {"t": kind, **packed} if kind else packed


def _unpack(cls: type[T], raw: Any) -> T:
    """Build `cls` from a map, checking each field. Raises ValueError or TypeError that names the field."""
    if not isinstance(raw, dict):
        raise ValueError("expected a map")
    values = {}
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name in raw:
            try:
                values[f.name] = f.metadata["check"](raw[f.name])
            except (ValueError, TypeError) as error:
                raise ValueError(f"{f.name}: {error}") from None
    return cls(**values)
