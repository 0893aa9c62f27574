"""The worker's events → the text of the answers, piece by piece. The one path of streams and whole answers alike.

Runs in the request's own thread or greenlet. Knows neither HTTP nor JSON.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import ErrorCode, RequestError
from common.wire import Failed, Finished, Tokens, Usage
from web.link.call import CallSpec
from web.text.decode_stream import DecodeStream
from web.text.stop_matcher import StopMatcher


@dataclass(frozen=True, slots=True)
class Delta:
    """Further text of one choice. finish_reason: `stop` or `length` with the choice's last one, otherwise None."""

    index: int
    text: str
    finish_reason: str | None = None


class Calls(Protocol):
    """What is needed of web.link's CallGroup."""

    def events(self) -> Iterator[tuple[int, Tokens | Finished | Failed] | None]:
        """Yield (index of the call, event), or None when a ping is due."""
        ...

    def cancel(self, index: int | None = None, reason: str = "") -> None:
        """Cancel a call; its terminal event still comes."""
        ...


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends an answer and what is seen of it.

    strings: they are looked for after the first `min_tokens` tokens. token_ids: the worker ends with one of these.
    kept: whether that which ends the answer is part of it.
    """

    strings: list[str] = field(default_factory=list)
    token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    kept: bool = False


class Choice:
    """One answer in the making: its text so far settled, its tokens counted."""

    def __init__(self, decoder: DecodeStream, stops: StopRules):
        self._decoder = decoder
        self._matcher = StopMatcher(stops.strings, stops.kept) if stops.strings else None
        self._min_tokens = stops.min_tokens
        self._hidden = frozenset() if stops.kept else stops.token_ids
        self.num_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None

    def take(self, ids: list[int]) -> str:
        """Take further tokens; return the text that can go out. Tokens after a stop string do not count."""
        if self._matcher is None:
            self.num_tokens += len(ids)
            return self._decoder.step([token_id for token_id in ids if token_id not in self._hidden])
        text = ""
        for token_id in ids:  # one by one, to count those up to the one that completes the stop string
            self.num_tokens += 1
            piece = "" if token_id in self._hidden else self._decoder.step([token_id])
            text += piece if self.num_tokens <= self._min_tokens else self._matcher.feed(piece)
            if self._matcher.stopped:
                self.finish_reason = "stop"
                break
        return text

    def finish(self, reason: str) -> str:
        """End with the worker's reason, unless a stop string is found in the very last text; return what is left."""
        text = self._decoder.flush()
        self.finish_reason = reason
        if self._matcher is None:
            return text
        text = self._matcher.feed(text)
        if self._matcher.stopped:
            self.finish_reason = "stop"
        return text + self._matcher.flush()


class Generation:
    """The answers to one HTTP request: `answers_per_prompt` calls to each prompt, one after another."""

    def __init__(self, calls: Calls, specs: list[CallSpec], choices: list[Choice], answers_per_prompt: int = 1):
        self._calls = calls
        self._num_prompt_tokens = sum(len(spec.prompt_ids) for spec in specs[::answers_per_prompt])
        self._choices = choices
        self._answers_per_prompt = answers_per_prompt

    @property
    def usage(self) -> Usage:
        """The token counts of all choices together; right once `deltas` has ended.

        A prompt counts once, and so do its cached tokens: those that its first call found.
        """
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=sum(choice.cached_tokens for choice in self._choices[:: self._answers_per_prompt]),
        )

    def deltas(self) -> Iterator[Delta | None]:
        """Yield what there is to tell, None when there is nothing but the stream should show life.

        Raises RequestError when the worker fails a call, ClientGone when the client left.
        """
        for item in self._calls.events():
            if item is None:
                yield None
                continue
            index, event = item
            delta = self._take(index, self._choices[index], event)
            if delta is not None:
                yield delta

    def _take(self, index: int, choice: Choice, event: Tokens | Finished | Failed) -> Delta | None:
        already_finished = choice.finish_reason is not None
        if isinstance(event, Finished):
            choice.cached_tokens = event.usage.cached_tokens
        if already_finished:
            return None
        if isinstance(event, Tokens):
            text = choice.take(event.ids)
            if choice.finish_reason:
                self._calls.cancel(index, "a stop string was found")
            return Delta(index, text, choice.finish_reason) if text or choice.finish_reason else None
        if isinstance(event, Failed):
            raise RequestError(event.code, event.message)
        if event.reason == "cancelled":
            raise RequestError(ErrorCode.WORKER_LOST, "the request was cancelled by the server")
        return Delta(index, choice.finish(event.reason), choice.finish_reason)
