"""Log-probabilities over HTTP: they cover exactly the text that was answered, in both forms, streamed or not."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.api import ANSWER, TOKENIZER, Api, check_error, events, ids_of
from tests.support.fake_link import say
from tests.support.fake_runner import fake_logprobs
from tests.support.tiny_tokenizer import IM_END


def chat(api: Api, stream: bool, **fields: Any) -> tuple[str, list[dict[str, Any]]]:
    """Return the text of a chat and all entries of its logprobs, after checking that none comes before its text."""
    fields = {"logprobs": True, "stream": stream, **fields}
    if not stream:
        [choice] = api.chat(**fields).get_json()["choices"]
        return choice["message"]["content"], choice["logprobs"]["content"]
    text, entries = "", []
    for chunk in events(api.chat(**fields)):
        [choice] = chunk["choices"]
        content = choice["delta"].get("content", "")
        mine = choice["logprobs"]["content"] if choice["logprobs"] else []
        text += content
        entries += mine
        # A token of which a part is held back, because a stop string may begin there, comes with the rest.
        assert text.encode().startswith(b"".join(bytes(entry["bytes"]) for entry in entries))
    return text, entries


def completion(api: Api, stream: bool, **fields: Any) -> tuple[str, dict[str, list[Any]]]:
    """Return the text of a completion and its logprobs, the chunks' joined."""
    if not stream:
        [choice] = api.text(**fields).get_json()["choices"]
        return choice["text"], choice["logprobs"]
    joined: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    text = ""
    for chunk in events(api.text(stream=True, **fields)):
        [choice] = chunk["choices"]
        text += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            joined[name] += values
    return text, joined


@pytest.mark.parametrize("per_step", [1, 2, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_chat(text_folder: Path, stream: bool, per_step: int) -> None:
    """One entry for each token, with its bytes; characters spread over tokens have their bytes in each."""
    api = Api(text_folder, per_step=per_step)
    text, entries = chat(api, stream, top_logprobs=2)
    assert text == ANSWER
    ids = ids_of(ANSWER)
    assert len(entries) == len(ids)
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == ANSWER
    for token_id, entry in zip(ids, entries, strict=True):
        assert entry["token"] == bytes(entry["bytes"]).decode("utf-8", "replace")
        assert entry["logprob"] == -0.5
        told = fake_logprobs(token_id, 2)
        assert [top["logprob"] for top in entry["top_logprobs"]] == told.top_logprobs
        assert entry["top_logprobs"][0] == {"token": entry["token"], "logprob": -0.5, "bytes": entry["bytes"]}


def test_chat_without_top_logprobs(text_folder: Path) -> None:
    _, entries = chat(Api(text_folder), False)
    assert all(entry["top_logprobs"] == [] for entry in entries)
    assert Api(text_folder).chat().get_json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("per_step", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_completions(text_folder: Path, stream: bool, per_step: int) -> None:
    """Four lists of the same length; the tokens joined are the text, each at its offset."""
    answer = "hello world and 42 more"
    api = Api(text_folder, next_id=say(ids_of(answer)), per_step=per_step)
    text, logprobs = completion(api, stream, logprobs=3)
    assert text == "".join(logprobs["tokens"]) == answer
    for token, offset, top in zip(logprobs["tokens"], logprobs["text_offset"], logprobs["top_logprobs"], strict=True):
        assert answer[offset:].startswith(token)
        assert top[token] == -0.5
        assert 1 <= len(top) <= 3
    assert logprobs["token_logprobs"] == [-0.5] * len(logprobs["tokens"])


@pytest.mark.parametrize("per_step", [1, 2, 100])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "stop"),
    [
        ("hello world and more", " world"),
        ("hello world and more", ["more", "o w"]),
        ("the quick brown fox", "ick br"),
        ("say 你好 now", "好"),
        ("say 你好 now", "你"),
        ("aaab", "aab"),
        ("hello", "hello"),
        ("ends with a sto", "stop"),
        ("emoji 😀 cut", "cut"),
    ],
)
def test_an_answer_cut_by_a_stop_string(text_folder: Path, answer: str, stop: Any, stream: bool, per_step: int) -> None:
    """The entries are those of the text that was answered, no more, no less; of a token cut in two the first part."""
    api = Api(text_folder, next_id=say(ids_of(answer + " endless" * 9)), per_step=per_step)
    fields = {"stop": stop, "max_tokens": len(ids_of(answer))}
    text, entries = chat(api, stream, **fields)
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
    plain, logprobs = completion(api, stream, logprobs=0, **fields)
    assert plain == text
    assert all(offset < len(text) for offset in logprobs["text_offset"])
    assert len(logprobs["tokens"]) == len(entries)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ends_in_half_a_character(text_folder: Path, stream: bool) -> None:
    """What is not in the text is not in a chat's logprobs. A text completion counts it, with no text: lm-eval relies on
    one entry for each token."""
    ids = ids_of("hi 😀")[:-1]
    api = Api(text_folder, next_id=say(ids))
    text, entries = chat(api, stream)
    assert (text, b"".join(bytes(entry["bytes"]) for entry in entries)) == ("hi ", b"hi ")
    text, logprobs = completion(api, stream, logprobs=0)
    assert (text, "".join(logprobs["tokens"])) == ("hi ", "hi ")
    assert len(logprobs["tokens"]) == len(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_control_tokens_have_no_entry(text_folder: Path, stream: bool) -> None:
    """They have no text, unless it was asked for."""
    plain = [*ids_of("hi"), *ids_of(IM_END), *ids_of(" again")]
    for fields, wanted in (({}, "hi again"), ({"skip_special_tokens": False}, f"hi{IM_END} again")):
        text, entries = chat(Api(text_folder, next_id=say(plain)), stream, **fields)
        assert text == b"".join(bytes(entry["bytes"]) for entry in entries).decode() == wanted


def test_each_choice_has_its_own(text_folder: Path) -> None:
    api = Api(text_folder, next_id=lambda spec, done: None if len(done) == 3 else 300 + spec.params.seed + len(done))
    choices = api.chat(n=3, seed=5, logprobs=True).get_json()["choices"]
    for choice in choices:
        joined = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
        assert (
            joined.decode()
            == choice["message"]["content"]
            == TOKENIZER.decode([300 + 5 + choice["index"] + at for at in range(3)])
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hi 😀 you", ["hi 😀 you"], ids_of("hi 😀 you")])
def test_echo(text_folder: Path, stream: bool, prompt: Any) -> None:
    """The prompt's text, then the answer's; a stop string in the prompt stops nothing."""
    api = Api(text_folder)
    response = api.text(prompt, echo=True, stream=stream, stop="hi")
    if stream:
        text = "".join(chunk["choices"][0]["text"] for chunk in events(response))
    else:
        body = response.get_json()
        text = body["choices"][0]["text"]
        assert body["usage"]["completion_tokens"] == len(ids_of(ANSWER))
    assert text == "hi 😀 you" + ANSWER
    assert not api.spec.prompt_logprobs


@pytest.mark.parametrize("per_step", [1, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(text_folder: Path, stream: bool, per_step: int) -> None:
    """Tokens joined are prompt and text, offsets right, the first logprob null: lm-eval reads loglikelihoods so."""
    answer, prompt = " and more text", [*ids_of("hello "), *ids_of(IM_END), *ids_of("world")]
    api = Api(text_folder, next_id=say([*ids_of(answer), *ids_of(IM_END)]), per_step=per_step)
    text, logprobs = completion(api, stream, prompt=prompt, echo=True, logprobs=1)
    assert text == "".join(logprobs["tokens"]) == "hello world" + answer
    # One entry for each token, the control tokens with no text: clients count them.
    count = len(prompt) + len(ids_of(answer)) + 1
    assert {name: len(values) for name, values in logprobs.items()} == dict.fromkeys(logprobs, count)
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert logprobs["token_logprobs"][1:] == [-0.5] * (count - 1)
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token


def test_echo_of_several_prompts_and_answers(text_folder: Path) -> None:
    api = Api(text_folder, next_id=say(ids_of(" ok")))
    body = api.text(["hello", "you"], echo=True, logprobs=0, n=2).get_json()
    assert [choice["text"] for choice in body["choices"]] == ["hello ok", "hello ok", "you ok", "you ok"]
    for choice in body["choices"]:
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_logprobs_of_a_prompt_have_a_bound(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.prepare.MAX_PROMPT_LOGPROBS", 60)
    api = Api(text_folder)
    assert api.text([1] * 10, echo=True, logprobs=5).status_code == 200
    check_error(api.text([1] * 11, echo=True, logprobs=5), 400, "logprobs")
    assert api.text([1] * 11, logprobs=5).status_code == 200
