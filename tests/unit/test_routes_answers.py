"""Answers over HTTP, with a worker in memory: whole and streamed, and what ends them."""

from typing import Any

import pytest

from tests.support import tiny_tokenizer
from tests.support.api import (
    ANSWER,
    HELLO,
    TOKENIZER,
    MakeApi,
    events,
    finish_reasons,
    ids_of,
    joined,
)
from tests.support.fake_link import say
from tests.support.tiny_tokenizer import IM_END, IM_START

# --- whole answers ---


def test_a_whole_chat_answer(make_api: MakeApi) -> None:
    """Every member that OpenAI's clients read is there, and the counts are the real ones."""
    api = make_api(cached_tokens=4)
    response = api.chat(model="tiny")
    body = response.get_json()
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    num_prompt, num_answer = len(api.spec.prompt_ids), len(ids_of(ANSWER))
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": ANSWER, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    assert response.headers["X-Request-Id"] == api.link.groups[-1].ids[0]
    assert api.link.groups[-1].closed


def test_a_whole_text_answer(make_api: MakeApi) -> None:
    """The same for text completions."""
    body = make_api().text(max_tokens=3).get_json()
    assert (body["object"], body["id"][:5]) == ("text_completion", "cmpl-")
    (choice,) = body["choices"]
    assert choice == {"index": 0, "text": "hello ", "logprobs": None, "finish_reason": "length"}
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts(make_api: MakeApi, stream: bool) -> None:
    """A list of prompts gives a choice for each, by its index; streamed or not."""
    api = make_api(next_id=lambda spec, done: None if len(done) == len(spec.prompt_ids) else spec.prompt_ids[len(done)])
    response = api.text(["one", "two words", "three"], stream=stream)
    if stream:
        chunks = events(response)
        texts = [joined(chunks, index) for index in range(3)]
        assert sorted(finish_reasons(chunks)) == [(0, "stop"), (1, "stop"), (2, "stop")]
    else:
        texts = [choice["text"] for choice in response.get_json()["choices"]]
    assert texts == ["one", "two words", "three"]


@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.parametrize("stream", [False, True])
def test_several_answers(make_api: MakeApi, kind: str, stream: bool) -> None:
    """n gives n choices to each prompt, each drawn with a seed of its own; the prompt counts once.

    The first is what n = 1 would have given.
    """
    api = make_api(next_id=lambda spec, done: None if done else 300 + spec.params.seed, cached_tokens=1)
    fields = {"n": 3, "seed": 7, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    response = api.chat(**fields) if kind == "chat" else api.text(["one", "two"], **fields)
    count = 3 if kind == "chat" else 6
    (group,) = api.link.groups
    assert [spec.params.seed for spec in group.specs] == [7, 8, 9] * (count // 3)
    wanted = [TOKENIZER.decode([300 + spec.params.seed]) for spec in group.specs]
    if stream:
        *chunks, last = events(response)
        texts, usage = [joined(chunks, index) for index in range(count)], last["usage"]
        assert sorted(finish_reasons(chunks)) == [(index, "stop") for index in range(count)]
    else:
        body = response.get_json()
        assert [choice["index"] for choice in body["choices"]] == list(range(count))
        texts = [choice["message"]["content"] if kind == "chat" else choice["text"] for choice in body["choices"]]
        usage = body["usage"]
    assert texts == wanted
    prompts = {tuple(spec.prompt_ids) for spec in group.specs}
    assert usage["prompt_tokens"] == sum(map(len, prompts))
    assert usage["completion_tokens"] == count
    assert usage["prompt_tokens_details"] == {"cached_tokens": len(prompts)}


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
def test_prompts_of_token_ids(make_api: MakeApi, prompt: Any) -> None:
    """Token ids reach the worker as they are."""
    api = make_api()
    assert api.text(prompt).status_code == 200
    assert api.spec.prompt_ids == [1, 2, 3]


# --- streams ---


@pytest.mark.parametrize("per_step", [1, 3, 100])
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_stream_is_the_whole_answer_in_pieces(make_api: MakeApi, kind: str, per_step: int) -> None:
    """Joined deltas equal the whole text; no U+FFFD; one finish reason; line separators do not cut a line in two."""
    api = make_api(per_step=per_step)
    response = getattr(api, kind)(stream=True)
    assert response.mimetype == "text/event-stream"
    assert (response.headers["Cache-Control"], response.headers["X-Accel-Buffering"]) == ("no-cache", "no")
    assert len(response.get_data().splitlines()) == len(response.get_data().decode().splitlines())
    chunks = events(response)
    assert joined(chunks) == ANSWER
    assert finish_reasons(chunks) == [(0, "stop")]
    assert "\ufffd" not in response.get_data().decode()
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)
    assert api.link.groups[-1].closed


def test_the_form_of_chat_chunks(make_api: MakeApi) -> None:
    """The role first, then content, then the finish reason with an empty delta, as OpenAI sends them."""
    chunks = [chunk["choices"][0] for chunk in events(make_api(next_id=say(ids_of("hello"))).chat(stream=True))]
    assert chunks == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"content": "hello"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"},
    ]


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_usage_in_a_stream(make_api: MakeApi, kind: str) -> None:
    """With include_usage the last chunk alone has counts and no choices; the others say null."""
    api = make_api(cached_tokens=2)
    *chunks, last = events(getattr(api, kind)(stream=True, stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["choices"] == []
    assert last["usage"] == getattr(api, kind)().get_json()["usage"]


def test_what_is_merged_comes_as_one_chunk(make_api: MakeApi) -> None:
    """Tokens that arrive together leave together: a slow client costs few chunks."""
    chunks = events(make_api(per_step=100).chat(stream=True))
    assert sum(bool(chunk["choices"][0]["delta"].get("content")) for chunk in chunks) == 1


def test_pings_keep_a_silent_stream_alive(make_api: MakeApi) -> None:
    """While nothing is there to say, a comment shows that the connection lives."""
    api = make_api(pings=True)
    assert b"\n\n: ping\n\n" in api.chat(stream=True).get_data()
    assert joined(events(api.chat(stream=True))) == ANSWER
    assert api.chat().get_json()["choices"][0]["message"]["content"] == ANSWER


# --- stop strings ---


@pytest.mark.parametrize("per_step", [1, 2, 100])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "stop", "text"),
    [
        ("hello world and more", " world", "hello"),
        ("hello world and more", ["more", "o w"], "hell"),
        ("the quick brown fox", "ick br", "the qu"),
        ("say 你好 now", "好", "say 你"),
        ("aaab", "aab", "a"),
        ("hello", "hello", ""),
        ("never", ["x", "y"], "never"),
        ("ends with a stop", "stop", "ends with a "),
        ("ends with a sto", "stop", "ends with a sto"),
    ],
)
def test_stop_strings(make_api: MakeApi, answer: str, stop: Any, text: str, stream: bool, per_step: int) -> None:
    """Matched across token borders, the text is cut before, the worker stops, and the tokens up to it count."""
    api = make_api(next_id=say(ids_of(answer + " endless" * 20)), per_step=per_step)
    fields = {"stop": stop, "max_tokens": max(len(ids_of(answer)), 1)}
    if stream:
        chunks = events(api.chat(stream=True, stream_options={"include_usage": True}, **fields))
        usage = chunks.pop()["usage"]
        seen, reasons = joined(chunks), finish_reasons(chunks)
    else:
        body = api.chat(**fields).get_json()
        usage, choice = body["usage"], body["choices"][0]
        seen, reasons = choice["message"]["content"], [(0, choice["finish_reason"])]
    assert seen == text
    stops = [stop] if isinstance(stop, str) else stop
    ids, stopped = ids_of(answer), text != answer
    assert reasons == [(0, "stop" if stopped else "length")]
    needed = len(ids)
    if stopped:
        needed = next(n for n in range(len(ids) + 1) if any(each in TOKENIZER.decode(ids[:n]) for each in stops))
    assert usage["completion_tokens"] == needed


def test_a_stop_string_cancels_only_its_own_choice(make_api: MakeApi) -> None:
    """The other choices of the request go on to their ends."""
    api = make_api(next_id=lambda spec, done: (spec.prompt_ids * 3 + [None])[len(done)])
    body = api.text(["hello", "world"], stop="hello").get_json()
    assert [(choice["text"], choice["finish_reason"]) for choice in body["choices"]] == [
        ("", "stop"),
        ("worldworldworld", "stop"),
    ]
    assert list(api.link.groups[-1].cancelled) == [0]


def test_a_control_token_as_stop_string(make_api: MakeApi) -> None:
    """It ends the answer when the model gives that token, and is not seen; its letters end the answer as well."""
    control = TOKENIZER.token_to_id(IM_START)
    api = make_api(next_id=say([*ids_of("yes"), control, *ids_of("no")]))
    choice = api.chat(stop=IM_START, ignore_eos=True).get_json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("yes", "stop")
    assert api.spec.stop_token_ids == [control]
    plain = tiny_tokenizer.build()
    plain.encode_special_tokens = True
    letters = make_api(next_id=say(plain.encode(f"yes{IM_START}no").ids))
    assert letters.chat(stop=[IM_START]).get_json()["choices"][0]["message"]["content"] == "yes"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": " hello", "include_stop_str_in_output": True}, "hi hello"),
        ({"stop": "h", "min_tokens": len(ids_of("hi "))}, "hi "),
        ({"stop_token_ids": HELLO}, "hi "),
        ({"stop_token_ids": HELLO, "include_stop_str_in_output": True}, "hi hello"),
        ({"stop": IM_END}, "hi hello"),
        ({"stop": IM_END, "include_stop_str_in_output": True}, f"hi hello{IM_END}"),
        ({"skip_special_tokens": False}, f"hi hello{IM_END} again"),
        ({"skip_special_tokens": False, "stop": IM_END}, "hi hello"),
        ({}, "hi hello again"),
    ],
)
def test_what_is_seen_of_an_end(make_api: MakeApi, fields: dict[str, Any], text: str, stream: bool) -> None:
    """Stop strings and tokens are kept when asked for, and looked for after min_tokens; so are control tokens."""
    plain = [*ids_of("hi "), *HELLO, *ids_of(IM_END), *ids_of(" again")]
    response = make_api(next_id=say(plain)).chat(stream=stream, **fields)
    seen = joined(events(response)) if stream else response.get_json()["choices"][0]["message"]["content"]
    assert seen == text
