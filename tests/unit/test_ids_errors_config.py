"""What everything else leans on: ids, the error table, sampling parameters, configuration."""

import dataclasses
import re

import pytest

from common.config import (
    WebConfig,
    WireConfig,
    WorkerConfig,
    check_together,
    default_cache_dir,
    known_settings,
    load,
    local_endpoint,
    runtime_dir,
    to_env,
)
from common.errors import ERROR_KINDS, ConfigError, ErrorCode, RequestError, TokenloomError, WireError
from common.ids import is_topic, new_incarnation, new_request_id, new_seed, new_topic
from common.params import INTEGER_PARAMS, PARAM_RANGES, SamplingParams

# --- ids ---


def test_ids_have_their_form_and_never_repeat():
    """Random, so none can be guessed and none collides after a restart."""
    ids = {new_request_id("chatcmpl") for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch(r"chatcmpl-[0-9a-f]{32}", id) for id in ids)
    assert len({new_incarnation() for _ in range(1000)}) == 1000


def test_no_topic_is_a_prefix_of_another():
    """ZeroMQ matches topics by prefix: all have one length, and nothing longer or shorter is a topic."""
    topics = {new_topic() for _ in range(1000)}
    assert len(topics) == 1000
    assert {len(topic) for topic in topics} == {19}
    for topic in topics:
        assert is_topic(topic)
        assert not is_topic(topic[:-1])
        assert not is_topic(topic + "/")
        assert not is_topic(topic.upper())
    assert not any(map(is_topic, ("", "p/", "hb/", "p/................/")))


def test_seeds_fit_everywhere_they_go():
    """A drawn seed is one a client could have given."""
    for _ in range(1000):
        assert SamplingParams(seed=new_seed()).problem() is None


# --- errors ---


def test_every_code_has_its_http_view():
    """One table: a code without a row would be a 500 nobody meant."""
    assert set(ERROR_KINDS) == set(ErrorCode)
    for code, kind in ERROR_KINDS.items():
        assert 400 <= kind.status <= 504
        assert kind.retryable == (kind.status in {429, 503, 504}), code


def test_codes_cross_as_plain_text():
    """The value is what a client sees; it is stable."""
    for code in ErrorCode:
        assert str(code) == code.value == code.name.lower()


def test_errors_carry_what_they_are_made_of():
    """The field at fault, the key at fault, the HTTP view."""
    error = RequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long", "messages")
    assert (error.kind.status, error.param, str(error)) == (400, "messages", "too long")
    assert ConfigError("port", "is busy").key == "port"
    assert str(ConfigError("port", "is busy")) == "port: is busy"
    assert all(issubclass(kind, TokenloomError) for kind in (RequestError, ConfigError, WireError))


# --- sampling parameters ---


def test_default_params_are_in_range():
    """What a client gets who sets nothing must be valid."""
    assert SamplingParams().problem() is None


@pytest.mark.parametrize("name", sorted(PARAM_RANGES))
def test_each_param_is_checked_and_named(name):
    """Both ends of the range, beyond them, booleans, text, and numbers that are none."""
    low, high = PARAM_RANGES[name]
    kind = int if name in INTEGER_PARAMS else float
    for value in (kind(low), kind(high)):
        problem = SamplingParams(**{name: value}).problem()
        assert problem is None or (name, value) == ("repetition_penalty", 0.0)
    bad = [kind(low) - 1, int(high) + 1, True, False, "1", None, [], float("nan"), float("inf"), float("-inf")]
    for value in bad + ([1.0] if kind is int else []):
        problem = SamplingParams(**{name: value}).problem()
        assert problem is not None, value
        assert problem[0] == name


def test_params_know_when_they_matter():
    """Greedy and penalised decide which work the sampler can leave out."""
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams().greedy
    assert not SamplingParams().penalised
    for name, value in (("presence_penalty", 0.1), ("frequency_penalty", -0.1), ("repetition_penalty", 1.1)):
        assert SamplingParams(**{name: value}).penalised  # type: ignore[arg-type]


# --- configuration ---


def test_defaults_load():
    """A user who sets nothing gets a configuration."""
    for cls in (WireConfig, WorkerConfig, WebConfig):
        assert load(cls, {}, {}) == cls()


def test_flags_win_over_variables_over_defaults():
    """One name in three spellings, the nearest wins."""
    env = {"TOKENLOOM_BLOCK_SIZE": "64", "TOKENLOOM_MAX_BATCH_SIZE": "8"}
    config = load(WorkerConfig, {"block_size": 16, "max_batch_size": None}, env)
    assert (config.block_size, config.max_batch_size, config.max_queued_requests) == (16, 8, 1024)


def test_variables_of_the_other_process_are_known():
    """One environment for all processes: web does not stumble over the worker's settings."""
    assert load(WebConfig, {}, {"TOKENLOOM_MODEL": "x", "TOKENLOOM_PORT": "81"}).port == 81


def test_an_empty_variable_is_not_set():
    """As compose files and shells write what is not given."""
    assert load(WebConfig, {}, {"TOKENLOOM_PORT": ""}).port == WebConfig().port


def test_an_unknown_variable_is_refused_by_name():
    """A typing error in a variable must not be silence."""
    with pytest.raises(ConfigError, match="TOKENLOOM_PROT") as caught:
        load(WebConfig, {}, {"TOKENLOOM_PROT": "80"})
    assert caught.value.key == "TOKENLOOM_PROT"


@pytest.mark.parametrize(
    ("cls", "name", "text"),
    [
        (WebConfig, "port", "http"),
        (WebConfig, "port", "70000"),
        (WebConfig, "port", "-1"),
        (WebConfig, "web_workers", "0"),
        (WebConfig, "web_workers", "2.5"),
        (WebConfig, "web_worker_class", "sync"),
        (WebConfig, "ping_interval_s", "nan"),
        (WebConfig, "graceful_timeout_s", "inf"),
        (WebConfig, "ping_interval_s", "0"),
        (WebConfig, "log_level", "loud"),
        (WebConfig, "submit_endpoint", "tcp://0.0.0.0:5555"),
        (WorkerConfig, "continuous_batching", "perhaps"),
        (WorkerConfig, "num_blocks", "0"),
        (WorkerConfig, "dtype", "float8"),
        (WorkerConfig, "heartbeat_interval_s", "0"),
        (WorkerConfig, "threads", "99999999999999999999"),
        (WorkerConfig, "num_blocks", "99999999999999999999"),
        (WorkerConfig, "stuck_limit_s", "1e300"),
        (WorkerConfig, "model", " "),
    ],
)
def test_a_bad_value_names_its_key(cls, name, text):
    """The start stops with the name of what is wrong: the variable, or the setting where a flag gave it."""
    with pytest.raises(ConfigError) as from_variable:
        load(cls, {}, {f"TOKENLOOM_{name.upper()}": text})
    assert from_variable.value.key == f"TOKENLOOM_{name.upper()}"
    with pytest.raises(ConfigError) as from_flag:
        load(cls, {name: text}, {})
    assert from_flag.value.key == name
    said = [str(caught.value).partition(": ")[2] for caught in (from_variable, from_flag)]
    assert said[0] == said[1]
    assert "must " in said[0]


@pytest.mark.parametrize("cls", [WorkerConfig, WebConfig])
def test_no_setting_takes_what_it_cannot_mean(cls):
    """Every number and switch refuses words, and every number refuses what lies below its range."""
    for field in dataclasses.fields(cls):
        kind = known_settings()[field.name]
        bad = {int: ["abc", "1.5", "", "-1"], float: ["abc", "", "-1", "nan"], bool: ["perhaps", ""]}.get(kind, [])
        for text in bad:
            with pytest.raises(ConfigError, match=f"^{field.name}: must be "):
                load(cls, {field.name: text}, {})


def test_settings_of_the_two_sides_must_fit():
    """A heartbeat that comes more rarely than it is waited for would make a living worker look dead."""
    check_together(WorkerConfig(heartbeat_interval_s=1.9), WebConfig(heartbeat_timeout_s=2.0))
    for interval_s in (2.0, 3.0):
        with pytest.raises(ConfigError, match="--heartbeat-timeout-s") as caught:
            check_together(WorkerConfig(heartbeat_interval_s=interval_s), WebConfig(heartbeat_timeout_s=2.0))
        assert caught.value.key == "heartbeat_interval_s"


@pytest.mark.parametrize(("text", "value"), [("1", True), ("True", True), ("off", False), ("no", False)])
def test_booleans_in_variables(text, value):
    """The usual spellings."""
    assert load(WorkerConfig, {}, {"TOKENLOOM_CONTINUOUS_BATCHING": text}).continuous_batching is value


def test_a_child_process_gets_the_same_configuration():
    """What the supervisor hands on through the environment loads as what it had."""
    worker = load(WorkerConfig, {"num_blocks": 77, "prefix_caching": False, "subscriber_grace_s": 0.5}, {})
    web = load(WebConfig, {"port": 0, "web_worker_class": "gthread"}, {})
    assert load(WorkerConfig, {}, to_env(worker)) == worker
    assert load(WebConfig, {}, to_env(web)) == web


@pytest.mark.parametrize(
    ("endpoint", "fine"),
    [
        ("ipc:///tmp/x.sock", True),
        ("ipc://" + "x" * 100, False),
        ("ipc://", False),
        ("tcp://127.0.0.1:5555", True),
        ("tcp://localhost:5555", True),
        ("tcp://[::1]:5555", True),
        ("tcp://127.0.0.1", False),
        ("tcp://0.0.0.0:5555", False),
        ("tcp://*:5555", False),
        ("tcp://10.0.0.1:5555", False),
        ("tcp://example.com:5555", False),
        ("inproc://x", False),
        ("", False),
    ],
)
def test_endpoints_stay_on_this_machine(endpoint, fine):
    """The wire is not encrypted, so only private sockets and the loopback are taken."""
    assert (local_endpoint(endpoint) is None) is fine


def test_default_endpoints_are_private_to_the_user(monkeypatch, tmp_path):
    """Sockets lie in the user's runtime folder where there is one; web and worker agree by default."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert runtime_dir() == tmp_path / "tokenloom"
    assert WorkerConfig().submit_endpoint == WebConfig().submit_endpoint == f"ipc://{tmp_path}/tokenloom/submit.sock"
    assert WorkerConfig().publish_endpoint == WebConfig().publish_endpoint
    assert default_cache_dir() == str(tmp_path / "cache" / "tokenloom")


def test_every_setting_explains_itself():
    """Each has a help text, and one name has one type and one meaning."""
    for cls in (WorkerConfig, WebConfig):
        for field in dataclasses.fields(cls):
            assert field.metadata["help"], field.name
    shared = {f.name for f in dataclasses.fields(WorkerConfig)} & {f.name for f in dataclasses.fields(WebConfig)}
    assert shared == {f.name for f in dataclasses.fields(WireConfig)}
