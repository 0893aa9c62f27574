"""What counts as a success, as a token and as the first token of a streamed completion."""

import json
from typing import Any

import pytest

from cli.bench.sse import SSEEvent
from cli.bench.stream import CompletionStream, StreamRules

ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}},
}
DONE = "[DONE]"


def text(content: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": None}]}


def read(*chunks: Any, rules: StreamRules | None = None, truncated: bool = False) -> CompletionStream:
    """A stream of these chunks, one a second from second 1, read to its end."""
    stream = CompletionStream(rules or StreamRules())
    for at_s, chunk in enumerate(chunks, start=1):
        event = chunk if isinstance(chunk, SSEEvent) else SSEEvent("", chunk if chunk == DONE else json.dumps(chunk))
        stream.read(event, float(at_s))
    stream.end(truncated)
    return stream


def test_first_token_is_the_first_real_text() -> None:
    """Neither the role delta nor an empty delta nor the finish chunk marks a time."""
    stream = read(ROLE, text(""), text("a"), text("b"), FINISH, USAGE, DONE)
    assert stream.error == ""
    assert stream.text_times_s == [3.0, 4.0]
    assert (stream.output_tokens, stream.prompt_tokens, stream.cached_tokens) == (5, 9, 4)
    assert stream.finish_reason == "length"


def test_reasoning_and_legacy_completion_text_count_as_text() -> None:
    legacy = {"choices": [{"index": 0, "text": "x", "finish_reason": None}]}
    reasoning = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}
    assert read(legacy, reasoning, FINISH, USAGE, DONE).text_times_s == [1.0, 2.0]


@pytest.mark.parametrize(
    ("chunks", "kind"),
    [
        ((text("a"), FINISH, USAGE), "no_done"),
        ((text("a"), USAGE, DONE), "no_finish"),
        ((ROLE, FINISH, USAGE, DONE), "no_text"),
        ((text("a"), FINISH, DONE), "no_usage"),
        ((text("a"), FINISH, {"usage": {"completion_tokens": None}}, DONE), "no_usage"),
        ((text("a"), {"error": {"message": "boom"}}, DONE), "error_event"),
        ((text("a"), {"error": "boom"}), "error_event"),
        ((text("a"), SSEEvent("error", "{}"), DONE), "error_event"),
        ((text("a"), SSEEvent("", "{not json"), FINISH, USAGE, DONE), "bad_event"),
        ((text("a"), SSEEvent("", "[1]"), FINISH, USAGE, DONE), "bad_event"),
        (({"choices": ["a"]}, FINISH, USAGE, DONE), "bad_event"),
        ((text("a"), FINISH, USAGE, DONE, text("b")), "bad_event"),
        ((), "no_done"),
    ],
)
def test_a_broken_stream_is_never_a_success(chunks: tuple[Any, ...], kind: str) -> None:
    """Every way a stream can be incomplete has a kind; the first failure is the one kept."""
    assert read(*chunks).error == kind


def test_a_stream_cut_inside_an_event_is_a_failure_even_without_a_done_rule() -> None:
    rules = StreamRules(expect_done=False)
    assert read(text("a"), FINISH, USAGE, rules=rules, truncated=True).error == "truncated"


def test_servers_without_done_need_a_finish_reason() -> None:
    rules = StreamRules(expect_done=False)
    assert read(text("a"), FINISH, USAGE, rules=rules).error == ""
    assert read(text("a"), USAGE, rules=rules).error == "no_finish"


def test_chunks_stand_for_tokens_only_when_asked() -> None:
    rules = StreamRules(count="chunks")
    stream = read(ROLE, text("a"), text("b"), FINISH, DONE, rules=rules)
    assert (stream.error, stream.output_tokens) == ("", 2)
