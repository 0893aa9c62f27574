"""What may be sent: strict types and ranges, one field named, nothing of meaning dropped in silence."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ErrorCode, RequestError
from common.params import SamplingParams
from web.routes.body import parse_json
from web.schema.base import parse
from web.schema.chat import ChatRequest
from web.schema.completions import CompletionRequest
from web.text.chat_template import TemplateOptions

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, {"messages": HI, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, {"prompt": "hi", **fields})


def refused(make: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        make(**fields)
    assert error.value.code is ErrorCode.INVALID_REQUEST
    return error.value


NUMBERS = {
    "temperature": [0, 0.5, 2],
    "top_p": [0, 1],
    "top_k": [-1, 0, 50],
    "min_p": [0.05],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2.0, 2],
    "repetition_penalty": [0.1, 1.3],
    "seed": [0, -(2**63), 2**63 - 1],
    "typical_p": [0, 0.5, 1],
    "repeat_penalty": [0.1, 10],
    "xtc_probability": [0, 1],
    "xtc_threshold": [0, 0.5],
    "dry_multiplier": [0, 0.8],
    "dry_base": [1, 1.75],
    "dry_allowed_length": [0, 2],
    "dry_penalty_last_n": [-1, 0, 64],
    "min_tokens": [0, 7],
    "truncate_prompt_tokens": [-1, 1, 100],
    "priority": [-5, 0, 5],
    "max_tokens": [1, 100],
    "max_completion_tokens": [1],
    "n": [1, 128],
}


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(("field", "values"), NUMBERS.items())
def test_numbers_are_numbers(make, field, values):
    """Booleans and strings are no numbers, NaN and infinity neither; null is the default; values in range pass."""
    for value in [*values, None]:
        make(**{field: value})
    for bad in (True, False, "1", "", [1], {}, math.nan, math.inf, -math.inf, 10**30, -(10**30), 10**400):
        assert refused(make, **{field: bad}).param == field, bad


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 5.0),
        ("max_tokens", 1e8),
        ("n", 1_000_000),
        ("n", 129),
        ("best_of", 2),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1.5": 1}),
        ("logit_bias", {"99999999999": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"5": None}),
        ("logit_bias", [[5, 1]]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", ["a"]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [2**31]),
        ("dry_sequence_breakers", [""]),
        ("dry_sequence_breakers", "x"),
        ("truncate_prompt_tokens", 0),
        ("cache_salt", ""),
        ("cache_salt", 5),
        ("n", 0),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("repetition_penalty", 0),
        ("seed", 1.5),
        ("stream", 1),
        ("stream", "true"),
        ("ignore_eos", 0),
        ("model", 5),
        ("model", "\ud800"),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("stop", [5]),
        ("stop", {"a": 1}),
        ("stop", ["x"] * 65),
        ("stop", "x" * 1025),
        ("stop", "\udfff"),
        ("stream_options", {"include_usage": True}),
        ("stream_options", []),
    ],
)
@pytest.mark.parametrize("make", [chat, completion])
def test_bad_values_name_their_field(make, field, bad):
    """The client learns which field is wrong."""
    assert refused(make, **{field: bad}).param == field


NOT_SUPPORTED = [
    ("best_of", 2),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("guided_json", {}),
    ("guided_regex", "a"),
    ("structured_outputs", {}),
    ("grammar", "root ::= x"),
    ("use_beam_search", True),
    ("n_predict", 5),
]
NOT_SUPPORTED_IN_CHAT = [
    ("echo", True),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "auto"),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("prediction", {"type": "content", "content": "x"}),
    ("chat_template", "x"),
]
NOT_SUPPORTED_IN_COMPLETIONS = [("suffix", "x"), ("add_special_tokens", False)]


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        *[(make, *row) for row in NOT_SUPPORTED for make in (chat, completion)],
        *[(chat, *row) for row in NOT_SUPPORTED_IN_CHAT],
        *[(completion, *row) for row in NOT_SUPPORTED_IN_COMPLETIONS],
    ],
)
def test_what_would_change_the_answer_is_refused(make, field, value):
    """A known field that is not supported is 400 with its name, never dropped in silence."""
    assert refused(make, **{field: value}).param == field


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (chat, {"n": 1, "logprobs": False, "top_logprobs": None, "tools": [], "tool_choice": "none"}),
        (chat, {"response_format": {"type": "text"}, "modalities": ["text"], "logit_bias": {}, "functions": []}),
        (chat, {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}),
        (chat, {"parallel_tool_calls": True, "safety_identifier": "x", "prompt_cache_key": "y", "anything": [1]}),
        (chat, {"stream": True, "stream_options": {"include_obfuscation": False}}),
        (completion, {"n": 1, "best_of": 1, "echo": False, "suffix": None, "logprobs": None, "user": "me"}),
        (completion, {"suffix": "", "length_penalty": 1.0, "skip_special_tokens": True, "cache_prompt": True}),
    ],
)
def test_what_changes_nothing_is_taken(make, fields):
    """Clients send neutral values and fields of their own as a matter of course."""
    make(**fields)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([5], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "nobody", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages[0].role"),
        ([{"role": "assistant", "content": "x"}], "messages"),
        ([*HI, {"role": "assistant"}], "messages[1].content"),
        ([*HI, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], "messages[1].tool_calls"),
        ([*HI, {"role": "assistant", "content": "", "function_call": {"name": "f"}}], "messages[1].function_call"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {}}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": "\ud83d"}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    ],
)
def test_bad_messages(messages, param):
    """Each is 400 that names the place in the conversation."""
    assert refused(chat, messages=messages).param == param


def test_messages_as_the_template_sees_them():
    """Parts are joined, null is no text, extra keys go, the developer is the system."""
    request = chat(
        messages=[
            {"role": "developer", "content": "be brief", "cache_control": {"type": "ephemeral"}},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "x": 1}]},
            {"role": "assistant", "content": None, "tool_calls": [], "refusal": None},
            {"role": "user", "content": "", "name": "ann"},
        ]
    )
    assert [message.for_template() for message in request.messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "", "name": "ann"},
    ]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt, expected):
    """Text, texts, ids, lists of ids."""
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    "prompt",
    [
        *[None, 5, True, {}, [], [[]], [None], ["a", 1], [1, "a"], [1, True], [1, 1.0], [[1], "a"]],
        *[[-1], [2**31], [10**30], [["a"]], [[1], []], [[1], [-1]], "\ud800", ["a", "\ud800"]],
    ],
)
def test_bad_prompts(prompt):
    """No mixture, no empty list, no negative or absurd id; the field is `prompt`, whichever item is wrong."""
    param = refused(completion, prompt=prompt).param
    assert param is not None
    assert param.partition("[")[0] == "prompt"


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize("body", [None, [], "x", 5, True])
def test_the_body_is_an_object(schema, body):
    """A JSON list or scalar is refused before its fields are looked for."""
    with pytest.raises(RequestError, match="JSON object"):
        parse(schema, body)


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
def test_required_fields(schema):
    """messages and prompt are."""
    with pytest.raises(RequestError, match="is required"):
        parse(schema, {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["user", "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type"]), inner),
    max_leaves=8,
)
FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields})


@pytest.mark.parametrize(("schema", "base"), [(ChatRequest, {"messages": HI}), (CompletionRequest, {"prompt": "x"})])
@settings(max_examples=500, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_json_is_taken_or_refused_with_a_field(schema, base, fields):
    """Whatever is sent, nothing but RequestError comes out, and it names a field that was sent or is missing."""
    complaint = None
    try:
        request = parse(schema, {**base, **fields})
    except RequestError as error:
        complaint = error
    if complaint is None:
        assert not any(params.problem() for params in request.sampling_params())
    else:
        assert complaint.param is not None
        assert complaint.param.partition("[")[0].partition(".")[0] in {*fields, *base}


def test_absent_and_null_mean_the_default():
    """OpenAI's defaults, and a random seed for each request."""
    for request in (chat(), chat(temperature=None, top_p=None, seed=None, stop=None, max_tokens=None)):
        [params] = request.sampling_params()
        assert params == SamplingParams(seed=params.seed)
        assert request.limit is None
        assert request.stops == []
    assert chat().sampling_params()[0].seed != chat().sampling_params()[0].seed


def test_sampling_fields_reach_the_parameters():
    """Under whichever server's name they were sent."""
    sent = {
        "logit_bias": {"5": -100, "0": 1.5},
        "allowed_token_ids": [7, 8],
        "min_tokens": 3,
        "typical_p": 0.9,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "dry_multiplier": 0.8,
        "dry_base": 2,
        "dry_allowed_length": 4,
        "dry_penalty_last_n": 64,
        "repeat_penalty": 1.2,
    }
    [params] = chat(**sent).sampling_params((1, 2))
    assert dict(params.logit_bias) == {5: -100, 0: 1.5}
    assert (params.allowed_token_ids, params.min_tokens, params.typical_p) == ((7, 8), 3, 0.9)
    assert (params.xtc_probability, params.xtc_threshold, params.repetition_penalty) == (0.5, 0.2, 1.2)
    assert (params.dry_multiplier, params.dry_base, params.dry_allowed_length) == (0.8, 2, 4)
    assert (params.dry_range, params.dry_breakers) == (64, (1, 2))
    assert chat(dry_multiplier=1, dry_penalty_last_n=-1).sampling_params()[0].dry_range == 0
    assert chat(dry_multiplier=1, dry_penalty_last_n=0).sampling_params()[0].dry_multiplier == 0
    assert chat(dry_multiplier=1).breakers == ["\n", ":", '"', "*"]
    assert chat(dry_multiplier=1, dry_sequence_breakers=["x"]).breakers == ["x"]
    assert chat().breakers == []
    assert refused(chat, repeat_penalty=1.2, repetition_penalty=1.1).param == "repeat_penalty"
    assert refused(chat, min_tokens=6, max_tokens=5).param == "min_tokens"


def test_logprobs_are_asked_for_in_two_ways():
    """Chat says whether and how many, text completions how many; false means none there too."""
    assert chat().num_logprobs is completion().num_logprobs is completion(logprobs=False).num_logprobs is None
    assert (chat(logprobs=True).num_logprobs, chat(logprobs=True, top_logprobs=20).num_logprobs) == (0, 20)
    assert (completion(logprobs=0).num_logprobs, completion(logprobs=20).num_logprobs) == (0, 20)
    assert chat(logprobs=False, top_logprobs=0).num_logprobs is None
    for make, fields, param in (
        (chat, {"top_logprobs": 3}, "top_logprobs"),
        (chat, {"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (chat, {"logprobs": 1}, "logprobs"),
        (completion, {"logprobs": 21}, "logprobs"),
        (completion, {"logprobs": True}, "logprobs"),
    ):
        assert refused(make, **fields).param == param


def test_how_the_template_is_rendered():
    options = chat().template_options()
    assert (options.add_generation_prompt, options.continue_final_message, options.variables) == (True, False, {})
    sent = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    options = chat(add_generation_prompt=False, **sent).template_options()
    assert not options.add_generation_prompt
    assert options.variables == {"enable_thinking": False, "reasoning_effort": "low"}
    last = [*HI, {"role": "assistant", "content": "Once"}]
    assert parse(ChatRequest, {"messages": last, "continue_final_message": True}).template_options() == TemplateOptions(
        continue_final_message=True
    )
    for fields, param in (
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "y" * 20_000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"reasoning_effort": ""}, "reasoning_effort"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
    ):
        assert refused(chat, **fields).param == param
    empty = [*HI, {"role": "assistant", "content": None}]
    assert refused(chat, messages=empty, continue_final_message=True).param == "continue_final_message"


def test_seeds():
    """The same seed is the same number; a negative one is a seed too, but for -1, which means none."""
    assert chat(seed=7).sampling_params()[0].seed == 7
    assert chat(seed=-7).sampling_params()[0].seed == chat(seed=-7).sampling_params()[0].seed >= 0
    assert chat(seed=-1).sampling_params()[0].seed != chat(seed=-1).sampling_params()[0].seed


def test_limits_and_stops():
    """max_completion_tokens is the newer name of max_tokens; a stop string alone is a list of one."""
    assert chat(max_tokens=5).limit == ("max_tokens", 5)
    assert chat(max_completion_tokens=6, max_tokens=6).limit == ("max_completion_tokens", 6)
    assert refused(chat, max_completion_tokens=6, max_tokens=5).param == "max_completion_tokens"
    assert chat(stop="x").stops == chat(stop=["x", "x"]).stops == ["x"]
    assert chat(top_k=-1).sampling_params()[0].top_k == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" \n",
        b"{",
        b'{"a": 1} x',
        b"\xff\xfe{\x00}\x00",
        b'{"a": "\xe9"}',
        b'{"a"\x00: 1}',
        b"\x00" * 10,
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b"[" * 1_000_000,
        b'{"a":' * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b"\xef\xbb\xbf{}",
    ],
)
def test_bytes_that_are_no_json(body):
    """Each is refused with a reason, however deep or strange."""
    with pytest.raises(RequestError, match="the body"):
        parse_json(body)


def test_every_field_is_documented():
    """docs/API.md says of each field of the schemas what becomes of it."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "API.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)", text.replace("`guided_*`", " ".join(f"`{f}`" for f in FIELDS if "guided" in f))))
    assert set(FIELDS) - named == set()
