"""Requests over HTTP, with a worker in memory: what the worker is asked, and what is refused before it is."""

import json
from pathlib import Path

import pytest

from tests.support import tiny_tokenizer
from tests.support.api import (
    CHAT,
    CONTEXT,
    HI,
    TEXT,
    TOKENIZER,
    Api,
    MakeApi,
    check_error,
    ids_of,
)
from tests.support.tiny_tokenizer import IM_END, IM_START, STRICT

# --- what the worker is asked ---


def test_parameters_reach_the_worker(make_api: MakeApi) -> None:
    """Every sampling field is what was sent."""
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "seed": 7,
    }
    api = make_api()
    api.chat(**fields, max_tokens=9, ignore_eos=True)
    assert {name: getattr(api.spec.params, name) for name in fields} == fields
    assert (api.spec.max_tokens, api.spec.ignore_eos) == (9, True)


def test_vllms_and_llama_servers_parameters_reach_the_worker(make_api: MakeApi) -> None:
    """What is not OpenAI's too: each where the worker looks for it."""
    api = make_api()
    fields = {
        "logit_bias": {"5": -100},
        "allowed_token_ids": [5, 6],
        "min_tokens": 2,
        "stop_token_ids": [9],
        "stop": IM_END,
        "priority": -3,
        "cache_salt": "mine",
        "dry_multiplier": 0.5,
        "dry_sequence_breakers": ["o", "d"],
    }
    assert api.chat(**fields).status_code == 200
    spec = api.spec
    assert (spec.params.logit_bias, spec.params.allowed_token_ids, spec.params.min_tokens) == (
        ((5, -100.0),),
        (5, 6),
        2,
    )
    assert set(spec.stop_token_ids) == {9, *ids_of(IM_END)}
    assert (spec.priority, spec.tenant) == (-3, "mine")
    assert spec.params.dry_breakers == tuple(ids_of("a" + text)[-1] for text in "od")


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_token_ids_outside_the_vocabulary_in_a_field(make_api: MakeApi, field: str) -> None:
    api = make_api()
    for token_id, status in ((TOKENIZER.get_vocab_size() + 7, 200), (TOKENIZER.get_vocab_size() + 8, 400)):
        response = api.chat(**{field: {str(token_id): 1} if field == "logit_bias" else [token_id]})
        assert response.status_code == status
    check_error(response, 400, field)


def test_a_prompt_is_truncated_at_its_start(make_api: MakeApi) -> None:
    """To so many tokens at its end, or with -1 to what the context holds."""
    api = make_api()
    ids = [number % 200 + 1 for number in range(CONTEXT + 10)]
    for at_most, kept in ((3, 3), (-1, CONTEXT - 1), (CONTEXT - 1, CONTEXT - 1)):
        assert api.text(ids, truncate_prompt_tokens=at_most, max_tokens=1).status_code == 200
        assert api.spec.prompt_ids == ids[-kept:]
    check_error(api.text(ids, truncate_prompt_tokens=CONTEXT, max_tokens=1), 400, "prompt", "context_length_exceeded")


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_without_a_limit_the_rest_of_the_context_is_the_limit(make_api: MakeApi, kind: str) -> None:
    """Never 16 or 20 tokens."""
    api = make_api(next_id=lambda spec, done: 5)
    body = getattr(api, kind)().get_json()
    assert api.spec.max_tokens == CONTEXT - len(api.spec.prompt_ids)
    assert body["usage"]["total_tokens"] == CONTEXT
    assert body["choices"][0]["finish_reason"] == "length"


def test_each_prompt_of_a_list_has_the_rest_of_the_context(make_api: MakeApi) -> None:
    """The limit goes by each prompt's own length."""
    api = make_api()
    api.text([[1] * 10, [1] * 100])
    assert [spec.max_tokens for spec in api.link.groups[-1].specs] == [CONTEXT - 10, CONTEXT - 100]


def test_parts_are_the_joined_string(make_api: MakeApi) -> None:
    """Content as text parts has the same prompt tokens as the string."""
    api = make_api()
    parts = [{"type": "text", "text": "hello wor"}, {"type": "text", "text": "ld"}]
    one = api.chat(messages=[{"role": "user", "content": parts}]).get_json()
    two = api.chat(messages=[{"role": "user", "content": "hello world"}]).get_json()
    assert one["usage"] == two["usage"]
    assert api.link.groups[0].specs[0].prompt_ids == api.link.groups[1].specs[0].prompt_ids


def test_null_content_is_no_text(make_api: MakeApi) -> None:
    """An assistant's null never becomes the word None."""
    api = make_api()
    api.chat(messages=[*HI, {"role": "assistant", "content": None}, *HI])
    assert "None" not in TOKENIZER.decode(api.spec.prompt_ids)


def test_a_template_refuses(make_api: MakeApi, tmp_path: Path) -> None:
    """Its words are the answer, 400."""
    api = make_api(folder=tiny_tokenizer.write(tmp_path, STRICT))
    error = check_error(api.chat(messages=[{"role": "system", "content": "x"}, *HI]), 400, "messages")
    assert error["message"] == "System role not supported"
    error = check_error(api.chat(messages=[*HI, *HI]), 400, "messages")
    assert "must alternate" in error["message"]


def test_chat_with_a_base_model(make_api: MakeApi, tmp_path: Path) -> None:
    """Without a chat template chat is 400 that shows the way; completions work."""
    api = make_api(folder=tiny_tokenizer.write(tmp_path, template=None))
    assert "/v1/completions" in check_error(api.chat(), 400, "messages")["message"]
    assert api.text().status_code == 200


def prompt_of(api: Api) -> str:
    return TOKENIZER.decode(api.spec.prompt_ids, skip_special_tokens=False)


def test_the_answer_may_go_on_in_the_last_message(make_api: MakeApi) -> None:
    """The prompt ends with that message's text: no end of turn, no new one."""
    api = make_api()
    messages = [*HI, {"role": "assistant", "content": "Once upon"}]
    assert api.chat(messages=messages, continue_final_message=True, add_generation_prompt=False).status_code == 200
    assert prompt_of(api).endswith(f"{IM_START}assistant\nOnce upon")
    assert api.chat(messages=messages, add_generation_prompt=False).status_code == 200
    assert prompt_of(api).endswith(f"Once upon{IM_END}\n")
    assert api.chat(messages=messages).status_code == 200
    assert prompt_of(api).endswith(f"{IM_START}assistant\n")


def test_a_last_message_that_the_template_changes_cannot_go_on(make_api: MakeApi, tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content | upper }}{% endfor %}"
    api = make_api(folder=tiny_tokenizer.write(tmp_path, template))
    check_error(api.chat(continue_final_message=True), 400, "messages")


def test_the_template_sees_further_variables(make_api: MakeApi, tmp_path: Path) -> None:
    """reasoning_effort and chat_template_kwargs; control tokens in them are letters, as in messages."""
    template = (
        "{{ reasoning_effort }}/{{ enable_thinking }}/{{ note }}/{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    api = make_api(folder=tiny_tokenizer.write(tmp_path, template))
    variables = {"enable_thinking": False, "note": IM_END}
    assert api.chat(reasoning_effort="high", chat_template_kwargs=variables).status_code == 200
    assert prompt_of(api).endswith(f"high/False/{IM_END}/hi")
    assert not set(ids_of(IM_END)) & set(api.spec.prompt_ids)


# --- refused before anything runs ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "text", "ids"])
@pytest.mark.parametrize("extra", [0, 1, 1000])
def test_a_prompt_longer_than_the_context(make_api: MakeApi, kind: str, extra: int, stream: bool) -> None:
    """The same status, code and words, for chat, text and ids, streamed or not; LiteLLM looks for these words."""
    api = make_api()
    long = " hello" * (CONTEXT + extra)
    if kind == "chat":
        response = api.chat(messages=[{"role": "user", "content": long}], stream=stream)
    else:
        response = api.text(long if kind == "text" else [1] * (CONTEXT + extra), stream=stream)
    error = check_error(response, 400, "messages" if kind == "chat" else "prompt", "context_length_exceeded")
    assert "maximum context length" in error["message"]
    assert api.link.groups == []


@pytest.mark.parametrize("kind", ["chat", "text", "texts"])
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(make_api: MakeApi, kind: str, monkeypatch) -> None:
    """Encoding 8 MB takes minutes of a small machine's time, for a refusal."""
    api, long = make_api(), "word " * 10_000
    monkeypatch.setattr("web.text.model_text.ModelText.encode_prompt", None)
    monkeypatch.setattr("web.text.model_text.ModelText.encode_chat", None)
    half = {"role": "user", "content": long[: len(long) // 2]}
    response = api.chat(messages=[half, half]) if kind == "chat" else api.text([long] if kind == "texts" else long)
    error = check_error(response, 400, "messages" if kind == "chat" else "prompt", "context_length_exceeded")
    assert f"has more than {CONTEXT} tokens" in error["message"]
    assert not api.link.groups


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [CONTEXT, 100_000_000])
def test_more_tokens_than_the_context_has_room_for(make_api: MakeApi, field: str, value: int) -> None:
    """Refused with the name of the field that asked for too much."""
    api = make_api()
    check_error(api.chat(**{field: value}), 400, field, "context_length_exceeded")
    assert api.link.groups == []
    assert api.text([1] * 12, **{field: CONTEXT - 12}).status_code == 200


def test_ids_outside_the_vocabulary(make_api: MakeApi) -> None:
    """Refused here, so that no model sees them."""
    api = make_api()
    size = TOKENIZER.get_vocab_size() + 8
    assert api.text([size - 1]).status_code == 200
    check_error(api.text([size]), 400, "prompt")
    check_error(api.text([[1], [size]]), 400, "prompt")


def test_an_empty_prompt(make_api: MakeApi) -> None:
    """Nothing to go on from is 400, where the tokenizer adds no BOS."""
    check_error(make_api().text(""), 400, "prompt")


@pytest.mark.parametrize("name", [None, "", "tiny"])
def test_the_model_may_be_named_or_not(make_api: MakeApi, name: str | None) -> None:
    """No name means the served model."""
    assert make_api().chat(model=name).get_json()["model"] == "tiny"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_another_model(make_api: MakeApi, path: str) -> None:
    """404 with OpenAI's code."""
    body = {"model": "gpt-4o", "messages": HI, "prompt": "x"}
    check_error(make_api().client.post(path, json=body), 404, "model", "model_not_found")


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b"\x00", b"[" * 50_000, b'{"temperature": NaN}'])
def test_bodies_that_are_no_request(make_api: MakeApi, path: str, body: bytes) -> None:
    """400 in OpenAI's form, never 5xx."""
    check_error(make_api().client.post(path, data=body), 400)


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/json"])
def test_the_content_type_does_not_matter(make_api: MakeApi, content_type: str | None) -> None:
    """`curl -d` without a header says form; what parses as JSON is taken."""
    body = json.dumps({"messages": HI})
    assert make_api().client.post(CHAT, data=body, content_type=content_type).status_code == 200


def test_a_body_over_the_limit(make_api: MakeApi) -> None:
    """413 in OpenAI's form."""
    check_error(make_api().chat(messages=[{"role": "user", "content": "x" * 100_000}]), 413)


def test_a_bad_request_asks_nothing_of_the_worker(make_api: MakeApi) -> None:
    """It is refused before the worker hears of it."""
    api = make_api()
    for fields in ({"temperature": 9}, {"stop": [""]}, {"n": 0}, {"tools": [{}]}, {"model": "x"}):
        assert api.chat(**fields).status_code in {400, 404}
    assert api.link.groups == []
