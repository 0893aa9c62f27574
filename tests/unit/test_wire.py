"""The wire format: what is sent comes back equal, and nothing else gets through."""

import dataclasses
import math
import random
from typing import Any

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import given, settings

from common.errors import ErrorCode, WireError
from common.params import SamplingParams
from common.wire import (
    MAX_MESSAGE_BYTES,
    VERSION,
    Accepted,
    Batch,
    Cancel,
    Failed,
    Finished,
    Have,
    Heartbeat,
    Logprobs,
    ModelInfo,
    PromptLogprobs,
    Resync,
    Submit,
    Timings,
    Tokens,
    Usage,
    decode_to_web,
    decode_to_worker,
    encode,
)

TOPIC = "p/0123456789abcdef/"

COUNTS = st.integers(0, 2**53)
IDS = st.text(max_size=128)
TOPICS = st.text("0123456789abcdef", min_size=16, max_size=16).map(lambda digits: f"p/{digits}/")
TOKEN_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 10),
    typical_p=st.floats(0, 1),
    dry_breakers=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    logit_bias=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 100)), max_size=3).map(tuple),
    allowed_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    min_tokens=st.integers(0, 2**31 - 1),
    seed=st.integers(0, 2**63 - 1),
)
SUBMITS = st.builds(
    Submit,
    id=IDS,
    topic=TOPICS,
    prompt_ids=TOKEN_IDS,
    params=PARAMS,
    max_tokens=st.integers(1, 2**20),
    stop_token_ids=TOKEN_IDS,
    ignore_eos=st.booleans(),
    priority=st.integers(-(2**31), 2**31 - 1),
    tenant=st.text(max_size=256),
    deadline=st.none() | NUMBERS,
    grammar=st.none() | st.text(max_size=50),
    generated_ids=TOKEN_IDS,
    num_logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.booleans(),
)
LOGPROBS = st.builds(Logprobs, NUMBERS, st.lists(st.integers(0, 2**31 - 1), max_size=3), st.lists(NUMBERS, max_size=3))
CANCELS = st.builds(Cancel, id=IDS, reason=st.text(max_size=256))
RESYNCS = st.builds(
    Resync,
    topic=TOPICS,
    incarnation=st.text(max_size=64),
    requests=st.lists(st.builds(Have, id=IDS, have=COUNTS), max_size=5),
)
EVENTS = st.one_of(
    st.builds(Accepted, id=IDS),
    st.builds(Tokens, id=IDS, pos=COUNTS, ids=TOKEN_IDS),
    st.builds(PromptLogprobs, id=IDS, logprobs=st.lists(LOGPROBS, max_size=3)),
    st.lists(LOGPROBS, min_size=1, max_size=3).map(lambda many: Tokens("r", 0, [1] * len(many), many)),
    st.builds(
        Finished,
        id=IDS,
        reason=st.sampled_from(["stop", "length", "cancelled"]),
        usage=st.builds(Usage, COUNTS, COUNTS, COUNTS),
        timings=st.builds(Timings, NUMBERS, NUMBERS, NUMBERS),
    ),
    st.builds(
        Failed,
        id=IDS,
        code=st.sampled_from(list(ErrorCode)),
        message=st.text(max_size=4096),
        retryable=st.booleans(),
    ),
)
BATCHES = st.builds(
    Batch, incarnation=st.text(max_size=64), seq=st.integers(1, 2**53), events=st.lists(EVENTS, max_size=6)
)
MODELS = st.builds(
    ModelInfo,
    id=st.text(max_size=100),
    path=st.text(max_size=100),
    max_model_len=COUNTS,
    vocab_size=COUNTS,
    eos_token_ids=TOKEN_IDS,
    details=st.dictionaries(st.text(max_size=9), st.none() | st.booleans() | st.text(max_size=9) | COUNTS, max_size=5),
)
HEARTBEATS = st.builds(
    Heartbeat,
    incarnation=st.text(max_size=64),
    state=st.sampled_from(["loading", "ready", "draining"]),
    seq=COUNTS,
    model=st.none() | MODELS,
    step=COUNTS,
    step_age_s=NUMBERS,
    running=COUNTS,
    waiting=COUNTS,
    kv_blocks_used=COUNTS,
    kv_blocks_total=COUNTS,
    counters=st.dictionaries(st.text(max_size=9), COUNTS, max_size=5),
)

SUBMIT = Submit("r", TOPIC, [1, 2], SamplingParams(seed=7), 10, [3], True, -1, "t", 1.5, None, [4])
RESYNC = Resync(TOPIC, "life", [Have("r", 3), Have("s", 0)])
BATCH = Batch(
    "life",
    4,
    [
        Accepted("r"),
        Tokens("r", 0, [1, 2, 3]),
        Finished("r", "stop", Usage(2, 3)),
        Failed("s", ErrorCode.QUEUE_FULL, "full", True),
    ],
)
HEARTBEAT = Heartbeat(
    "life", "ready", 4, ModelInfo("m", "/m", 10, 100, [1], {"dtype": "f"}), 1, 0.5, 1, 2, 3, 4, {"a": 1}
)


@given(st.one_of(SUBMITS, CANCELS, RESYNCS))
def test_to_worker_comes_back_equal(message):
    """Every field of every message survives, whatever its value."""
    assert decode_to_worker(encode(message)) == message


@given(st.one_of(BATCHES, HEARTBEATS))
def test_to_web_comes_back_equal(message):
    """Every field of every message and event survives, whatever its value."""
    assert decode_to_web(encode(message)) == message


def raw(message: Any) -> dict[str, Any]:
    """A message as the plain map that travels."""
    value: dict[str, Any] = msgpack.unpackb(encode(message))
    return value


def changed(message: Any, **fields: Any) -> bytes:
    packed: bytes = msgpack.packb({**raw(message), **fields})
    return packed


def test_fields_are_names():
    """A map by name: fields may be added at any place without moving others."""
    assert raw(Cancel("r", "bye")) == {"v": VERSION, "t": "cancel", "id": "r", "reason": "bye"}


@pytest.mark.parametrize("message", [SUBMIT, RESYNC, Cancel("r")])
def test_each_direction_takes_its_own_messages(message):
    """A worker cannot be told what web is told, nor the other way round."""
    with pytest.raises(WireError):
        decode_to_web(encode(message))
    for other in (BATCH, HEARTBEAT):
        with pytest.raises(WireError):
            decode_to_worker(encode(other))


@pytest.mark.parametrize("version", [0, VERSION + 1, None, "1", 1.5, [], {}])
def test_another_version_is_refused(version):
    """A process of another release must not be half understood."""
    with pytest.raises(WireError, match="version"):
        decode_to_worker(changed(SUBMIT, v=version))


def test_unknown_names_are_ignored_and_missing_ones_take_their_default():
    """A field can be added without breaking older processes; one that is needed is missed."""
    assert decode_to_worker(changed(SUBMIT, colour="red")) == SUBMIT
    short = raw(SUBMIT)
    del short["tenant"]
    assert decode_to_worker(msgpack.packb(short)) == dataclasses.replace(SUBMIT, tenant="")
    del short["max_tokens"]
    with pytest.raises(WireError, match="max_tokens"):
        decode_to_worker(msgpack.packb(short))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", 7),
        ("id", "x" * 129),
        ("id", b"r"),
        ("topic", "p/"),
        ("topic", ""),
        ("topic", "p/0123456789abcdef"),
        ("topic", "p/0123456789abcdef/x"),
        ("topic", "p/0123456789ABCDEF/"),
        ("topic", TOPIC + "\n"),
        ("prompt_ids", "12"),
        ("prompt_ids", [1, -1]),
        ("prompt_ids", [1, 2**31]),
        ("prompt_ids", [1, 2.0]),
        ("prompt_ids", [True, 2]),
        ("prompt_ids", [[1]]),
        ("prompt_ids", {"0": 1}),
        ("prompt_ids", None),
        ("params", {"temperature": math.nan}),
        ("params", {"temperature": math.inf}),
        ("params", {"temperature": "1"}),
        ("params", {"temperature": True}),
        ("params", {"top_p": 1.5}),
        ("params", {"top_k": 1.0}),
        ("params", {"seed": -1}),
        ("params", {"repetition_penalty": 0.0}),
        ("params", {"logit_bias": [[1]]}),
        ("params", {"logit_bias": [1]}),
        ("params", {"logit_bias": [[1, 1, 1]]}),
        ("params", {"logit_bias": [[-1, 1]]}),
        ("params", {"logit_bias": [["1", 1]]}),
        ("params", {"logit_bias": [[1, 101]]}),
        ("params", {"logit_bias": [[1, "1"]]}),
        ("params", {"logit_bias": 1}),
        ("params", {"dry_breakers": [[1]]}),
        ("params", {"allowed_token_ids": [2**31]}),
        ("params", {"allowed_token_ids": [True]}),
        ("params", {"min_tokens": 1.5}),
        ("num_logprobs", 21),
        ("num_logprobs", -1),
        ("params", []),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**40),
        ("max_tokens", True),
        ("max_tokens", 1.0),
        ("stop_token_ids", list(range(1025))),
        ("ignore_eos", 1),
        ("priority", 2**40),
        ("tenant", "x" * 257),
        ("deadline", math.nan),
        ("deadline", "soon"),
        ("grammar", 5),
        ("generated_ids", [None]),
    ],
)
def test_a_bad_field_of_submit_is_named(field, value):
    """What passes the decoder can be trusted by the engine; what does not says which field it was."""
    with pytest.raises(WireError, match=field):
        decode_to_worker(changed(SUBMIT, **{field: value}))


@pytest.mark.parametrize(
    "event",
    [
        None,
        [],
        "accepted",
        {},
        {"t": "accepted"},
        {"t": ["accepted"], "id": "r"},
        {"t": "exploded", "id": "r"},
        {"t": "tokens", "id": "r", "pos": -1, "ids": []},
        {"t": "tokens", "id": "r", "pos": 0, "ids": [-1]},
        {"t": "finished", "id": "r", "reason": "tired", "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
        {"t": "finished", "id": "r", "reason": ["stop"], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
        {"t": "finished", "id": "r", "reason": "stop", "usage": {"prompt_tokens": 1}},
        {"t": "failed", "id": "r", "code": "no_such_code", "message": ""},
        {"t": "failed", "id": "r", "code": {}, "message": ""},
    ],
)
def test_a_bad_event_spoils_its_batch(event):
    """A batch is taken whole or not at all; a hole in the numbers then leads to a resync."""
    with pytest.raises(WireError, match="events"):
        decode_to_web(changed(BATCH, events=[*raw(BATCH)["events"], event]))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x00",
        b"hello",
        b"\xff" * 1000,
        b"\x91" * 100_000,
        b"\x81" * 100_000,
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        msgpack.packb([1, 2, 3]),
        msgpack.packb({}),
        msgpack.packb({1: 2}),
        msgpack.packb({"v": VERSION}),
        msgpack.packb({"v": VERSION, "t": "reboot"}),
        msgpack.packb({"v": VERSION, "t": ["submit"]}),
        msgpack.packb({"v": VERSION, "t": "submit"}),
        msgpack.packb(msgpack.ExtType(1, b"x")),
        msgpack.packb(msgpack.Timestamp(0)),
        encode(SUBMIT) + b"\x00",
        encode(SUBMIT)[:-1],
    ],
    ids=range(21),
)
def test_garbage_is_a_wire_error(data):
    """Not a crash, not a hang, not gigabytes of memory because a header says so."""
    with pytest.raises(WireError):
        decode_to_worker(data)
    with pytest.raises(WireError):
        decode_to_web(data)


def test_a_message_over_the_limit_is_refused_unread():
    """The size is checked before anything is unpacked."""
    with pytest.raises(WireError, match="limit"):
        decode_to_worker(bytes(MAX_MESSAGE_BYTES + 1))


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change a message a little: flip bits, cut, insert, repeat a piece, or replace one value of its map."""
    broken = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(broken) + 1)
        match rng.randrange(5):
            case 0 if broken:
                broken[at % len(broken)] ^= 1 << rng.randrange(8)
            case 1 if broken:
                broken[at % len(broken)] = rng.randrange(256)
            case 2:
                del broken[at : at + rng.randint(1, 8)]
            case 3:
                broken[at:at] = rng.randbytes(rng.randint(1, 8))
            case 4:
                piece = broken[at : at + rng.randint(1, 30)]
                broken[at:at] = piece
    return bytes(broken)


VALUES = [
    None,
    True,
    -1,
    0,
    2**63,
    1.5,
    math.nan,
    "",
    "x" * 5000,
    b"\x00",
    [],
    [None],
    [[]],
    {},
    {"t": "tokens"},
    {"": 1},
]


def replace_somewhere(value: Any, rng: random.Random) -> Any:
    """Replace one value somewhere inside by another of any type."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        return {**value, key: replace_somewhere(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], replace_somewhere(value[at], rng), *value[at + 1 :]]
    return rng.choice(VALUES)


@pytest.mark.parametrize("message", [SUBMIT, RESYNC, Cancel("r", "x"), BATCH, HEARTBEAT], ids=lambda m: m.TYPE)
@pytest.mark.parametrize("how", ["bytes", "values"])
def test_mutated_messages_raise_nothing_but_wire_errors(message, how):
    """60,000 broken messages: each is refused, or is a message within all bounds, for it can be sent again."""
    rng = random.Random(f"{message.TYPE} {how}")
    decode = decode_to_web if isinstance(message, Batch | Heartbeat) else decode_to_worker
    refused = 0
    for _ in range(6000):
        data = mutate(encode(message), rng) if how == "bytes" else msgpack.packb(replace_somewhere(raw(message), rng))
        try:
            taken = decode(data)
        except WireError:
            refused += 1
        else:
            assert decode(encode(taken)) == taken
    assert refused > 3000


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_wire_errors(data):
    """Whatever bytes arrive."""
    with pytest.raises(WireError):
        decode_to_worker(data)


def test_a_long_prompt_is_cheap_to_check():
    """A prompt of a million tokens passes whole."""
    prompt = list(range(1_000_000))
    message = dataclasses.replace(SUBMIT, prompt_ids=prompt)
    decoded = decode_to_worker(encode(message))
    assert isinstance(decoded, Submit)
    assert decoded.prompt_ids == prompt
