"""The JSON of answers: OpenAI's chat completion and text completion, whole and as stream chunks.

A chunk's JSON is put together from parts that are made once for each stream, because a chunk is sent for nearly every
token. Text goes out as UTF-8.
"""

import json
from collections.abc import Iterator
from json.encoder import encode_basestring
from typing import Any, Protocol

from common.wire import Usage
from web.generation import Answer, Delta
from web.logprobs import chat_logprobs, completion_logprobs
from web.scored import ScoredToken
from web.text.token_bytes import TokenBytes

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that JSON allows as they are, but at which some clients' line splitters would cut an SSE line in two."""


def json_bytes(value: Any) -> bytes:
    """Return a value as compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def event_bytes(value: Any) -> bytes:
    """Return a value as one SSE event."""
    return b"data: " + _one_line(json.dumps(value, ensure_ascii=False, separators=(",", ":"))).encode() + b"\n\n"


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return token counts in OpenAI's form."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _one_line(text: str) -> str:
    if not text.isascii():
        for character, escape in _LINE_ENDS.items():
            text = text.replace(character, escape)
    return text


class Format(Protocol):
    """How one endpoint's answer looks."""

    chunk_object: str
    whole_object: str

    def opening(self) -> dict[str, Any] | None:
        """Return what a choice's first chunk carries before there is text, or None when there is no such chunk."""
        ...

    def piece(self, text: str) -> dict[str, Any]:
        """Return what a chunk with text carries."""
        ...

    def ending(self) -> dict[str, Any]:
        """Return what the chunk with the finish reason carries."""
        ...

    def whole(self, text: str) -> dict[str, Any]:
        """Return what a choice of a whole answer carries."""
        ...

    def logprobs(self, tokens: list[ScoredToken]) -> dict[str, Any] | None:
        """Return the log-probabilities of some tokens, or None where none were asked for."""
        ...


class _LogprobsAsked:
    """token_bytes: of the model, when log-probabilities were asked for."""

    def __init__(self, token_bytes: TokenBytes | None = None):
        self._token_bytes = token_bytes


class ChatFormat(_LogprobsAsked):
    """Chat completions."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def opening(self) -> dict[str, Any] | None:
        """The role comes first."""
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> dict[str, Any]:
        """See Format."""
        return {"delta": {"content": text}}

    def ending(self) -> dict[str, Any]:
        """See Format."""
        return {"delta": {}}

    def whole(self, text: str) -> dict[str, Any]:
        """See Format."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, tokens: list[ScoredToken]) -> dict[str, Any] | None:
        """See Format."""
        return None if self._token_bytes is None else chat_logprobs(tokens, self._token_bytes)


class CompletionFormat(_LogprobsAsked):
    """Text completions."""

    chunk_object = "text_completion"
    whole_object = "text_completion"

    def opening(self) -> dict[str, Any] | None:
        """There is nothing to say before the text."""
        return None

    def piece(self, text: str) -> dict[str, Any]:
        """See Format."""
        return {"text": text}

    def ending(self) -> dict[str, Any]:
        """See Format."""
        return {"text": ""}

    def whole(self, text: str) -> dict[str, Any]:
        """See Format."""
        return {"text": text}

    def logprobs(self, tokens: list[ScoredToken]) -> dict[str, Any] | None:
        """See Format."""
        return None if self._token_bytes is None else completion_logprobs(tokens, self._token_bytes)


class Writer:
    """Writes the answers to one HTTP request. created: Unix time in seconds."""

    def __init__(self, form: Format, answer_id: str, created: int, model: str, num_choices: int):
        self._form = form
        self._head = {"id": answer_id, "object": form.whole_object, "created": created, "model": model}
        self._chunk_head = {**self._head, "object": form.chunk_object}
        self._num_choices = num_choices

    def whole(self, answers: list[Answer], usage: Usage) -> bytes:
        """Return the whole answer."""
        choices = [
            {
                "index": index,
                **self._form.whole(answer.text),
                "logprobs": self._form.logprobs(answer.tokens),
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(answers)
        ]
        return json_bytes({**self._head, "choices": choices, "usage": usage_json(usage)})

    def stream(self, deltas: Iterator[Delta | None], include_usage: bool) -> Iterator[bytes]:
        """Yield the events of a stream, up to the last chunk with a finish reason."""
        usage: dict[str, Any] = {"usage": None} if include_usage else {}
        opening = self._form.opening()
        if opening is not None:
            for index in range(self._num_choices):
                yield self._chunk(index, opening, None, usage)
        parts = [self._split(index, usage) for index in range(self._num_choices)]
        for delta in deltas:
            if delta is None:
                yield PING
                continue
            if delta.tokens:
                logprobs = self._form.logprobs(delta.tokens)
                yield self._chunk(delta.index, self._form.piece(delta.text), None, usage, logprobs)
            elif delta.text:
                before, after = parts[delta.index]
                yield before + _one_line(encode_basestring(delta.text)).encode() + after
            if delta.finish_reason:
                yield self._chunk(delta.index, self._form.ending(), delta.finish_reason, usage)

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the chunk with the token counts, which has no choices."""
        return event_bytes({**self._chunk_head, "choices": [], "usage": usage_json(usage)})

    def _chunk(
        self,
        index: int,
        carried: dict[str, Any],
        reason: str | None,
        usage: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, **carried, "logprobs": logprobs, "finish_reason": reason}
        return event_bytes({**self._chunk_head, "choices": [choice], **usage})

    def _split(self, index: int, usage: dict[str, Any]) -> tuple[bytes, bytes]:
        """Return what stands before and after the text in the chunks of one choice."""
        choice = {"index": index, **self._form.piece(""), "logprobs": None, "finish_reason": None}
        before = event_bytes({**self._chunk_head, "choices": []})[: -len(b"]}\n\n")]
        inner, after = json_bytes(choice).rsplit(b'""', 1)
        tail = json_bytes(usage)[1:-1]
        return before + inner, after + b"]" + (b"," + tail if tail else b"") + b"}\n\n"
