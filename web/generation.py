"""The worker's events → the text of the answers, piece by piece. The one path of streams and whole answers alike.

Runs in the request's own thread or greenlet. Knows neither HTTP nor JSON.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import ErrorCode, RequestError
from common.wire import Failed, Finished, Logprobs, PromptLogprobs, Tokens, Usage
from web.link.call import CallSpec, GroupEvent
from web.scored import ScoredToken, TokenLedger
from web.text.decode_stream import DecodeStream
from web.text.stop_matcher import StopMatcher


@dataclass(frozen=True, slots=True)
class Delta:
    """Further text of one choice. finish_reason: `stop` or `length` with the choice's last one, otherwise None.

    tokens: those of the text, when log-probabilities were asked for.
    """

    index: int
    text: str
    finish_reason: str | None = None
    tokens: list[ScoredToken] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """One whole choice."""

    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    finish_reason: str | None = None


class Calls(Protocol):
    """What is needed of web.link's CallGroup."""

    def events(self) -> Iterator[tuple[int, GroupEvent] | None]:
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
        self._ledger = TokenLedger()
        self.num_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None

    def take(self, event: Tokens) -> str:
        """Take further tokens; return the text that can go out. Tokens after a stop string do not count."""
        if self._matcher is None and not event.logprobs:
            self.num_tokens += len(event.ids)
            return self._decoder.step([token_id for token_id in event.ids if token_id not in self._hidden])
        text = ""
        # One by one, to count those up to the one that completes the stop string, and to know each one's text.
        for at, token_id in enumerate(event.ids):
            self.num_tokens += 1
            piece = "" if token_id in self._hidden else self._decoder.step([token_id])
            if event.logprobs:
                self._note(token_id, event.logprobs[at], piece)
            text += self._match(piece)
            if self._matcher is not None and self._matcher.stopped:
                self.finish_reason = "stop"
                break
        return text

    def echo(self, prompt_ids: list[int], logprobs: list[Logprobs] | None = None) -> str:
        """Return the prompt's text, which stands before the answer. logprobs: of its tokens after the first."""
        text = ""
        for at, token_id in enumerate(prompt_ids):
            piece = self._decoder.step([token_id])
            if logprobs is not None:
                self._note(token_id, logprobs[at - 1] if at else None, piece)
            text += piece
        return text

    def _note(self, token_id: int, logprobs: Logprobs | None, piece: str) -> None:
        if self._decoder.hides(token_id) or token_id in self._hidden:
            self._ledger.add_control_token(token_id, logprobs)
        else:
            self._ledger.add(token_id, logprobs, piece)

    def _match(self, piece: str) -> str:
        if self._matcher is None or self.num_tokens <= self._min_tokens:
            return piece
        return self._matcher.feed(piece)

    def scored(self, text: str) -> list[ScoredToken]:
        """Return the tokens of text that goes out now, when log-probabilities were asked for."""
        return self._ledger.tell(text, self.finish_reason is not None)

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
    """The answers to one HTTP request: `answers_per_prompt` calls to each prompt, one after another.

    echo: whether each begins with its prompt.
    """

    def __init__(
        self,
        calls: Calls,
        specs: list[CallSpec],
        choices: list[Choice],
        answers_per_prompt: int = 1,
        echo: bool = False,
    ):
        self._calls = calls
        self._specs = specs
        self._echo = echo
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
        for index, spec in enumerate(self._specs):
            if self._echo and not spec.prompt_logprobs:
                yield Delta(index, self._choices[index].echo(spec.prompt_ids))
        for item in self._calls.events():
            if item is None:
                yield None
                continue
            index, event = item
            delta = self._take(index, self._choices[index], event)
            if delta is not None:
                yield delta

    def answers(self) -> list[Answer]:
        """Wait for the end and return the choices whole. Raises as `deltas` does."""
        parts: list[list[str]] = [[] for _ in self._choices]
        answers = [Answer() for _ in self._choices]
        for delta in self.deltas():
            if delta is not None:
                parts[delta.index].append(delta.text)
                answers[delta.index].tokens += delta.tokens
        for answer, texts, choice in zip(answers, parts, self._choices, strict=True):
            answer.text, answer.finish_reason = "".join(texts), choice.finish_reason
        return answers

    def _take(self, index: int, choice: Choice, event: GroupEvent) -> Delta | None:
        already_finished = choice.finish_reason is not None
        if isinstance(event, Finished):
            choice.cached_tokens = event.usage.cached_tokens
        if already_finished:
            return None
        if isinstance(event, PromptLogprobs):
            text = choice.echo(self._specs[index].prompt_ids, event.logprobs)
            return Delta(index, text, tokens=choice.scored(text))
        if isinstance(event, Tokens):
            text = choice.take(event)
            if choice.finish_reason:
                self._calls.cancel(index, "a stop string was found")
            if not text and not choice.finish_reason:
                return None
            return Delta(index, text, choice.finish_reason, choice.scored(text))
        if isinstance(event, Failed):
            raise RequestError(event.code, event.message)
        if event.reason == "cancelled":
            raise RequestError(ErrorCode.WORKER_LOST, "the request was cancelled by the server")
        text = choice.finish(event.reason)
        return Delta(index, text, choice.finish_reason, choice.scored(text))
