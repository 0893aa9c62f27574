"""What one streamed completion said, and when: from events with arrival times to the facts that are measured.

Pure, no I/O, no clock: the caller says when each event arrived. Understands the chunks of both `/v1/chat/completions`
and `/v1/completions`. Decides alone whether a stream is a success, so that every client counts failures the same way.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from cli.bench.sse import SSEEvent

DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class StreamRules:
    """What a stream must show to count as a success.

    `expect_done`: it must end with `data: [DONE]`; without it a finish reason and a clean end of the body are enough.
    `count`: "usage" takes token counts from the server's `usage` and fails a stream without it; "chunks" counts every
    text chunk as one token, for servers that send no usage.
    """

    expect_done: bool = True
    count: str = "usage"


@dataclass
class CompletionStream:
    """One streamed answer, read event by event. `error` is "" until something fails; the first failure stays."""

    rules: StreamRules = field(default_factory=StreamRules)
    text_times_s: list[float] = field(default_factory=list)
    finish_reason: str = ""
    usage: dict[str, Any] | None = None
    done: bool = False
    error: str = ""
    detail: str = ""

    def read(self, event: SSEEvent, at_s: float) -> None:
        """Take one event that arrived at `at_s`. Only a chunk with text in it marks a time: no role delta, no ping."""
        if event.data == DONE:
            self.done = True
            return
        if self.done:
            return self.fail("bad_event", "an event after [DONE]")
        try:
            chunk = json.loads(event.data)
        except ValueError:
            return self.fail("bad_event", event.data)
        if not isinstance(chunk, dict):
            return self.fail("bad_event", event.data)
        if event.name == "error" or chunk.get("error"):
            return self.fail("error_event", event.data)
        if isinstance(chunk.get("usage"), dict):
            self.usage = chunk["usage"]
        for choice in chunk.get("choices") or []:
            if not isinstance(choice, dict):
                return self.fail("bad_event", event.data)
            if _text_of(choice):
                self.text_times_s.append(at_s)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def end(self, truncated: bool) -> None:
        """The body ended cleanly as HTTP sees it; `truncated` says that it did so inside an event. Judge the whole."""
        if truncated:
            self.fail("truncated", "the stream ended inside an event")
        elif self.rules.expect_done and not self.done:
            self.fail("no_done", "the stream ended without [DONE]")
        elif not self.finish_reason:
            self.fail("no_finish", "the stream ended without a finish reason")
        elif not self.text_times_s:
            self.fail("no_text", "no chunk had text")
        elif self.output_tokens is None:
            self.fail("no_usage", "the server sent no usage.completion_tokens")

    def fail(self, kind: str, detail: str) -> None:
        """Record a failure of this kind; a later one does not replace it, for it is most often its consequence."""
        if not self.error:
            self.error, self.detail = kind, detail[:300]

    @property
    def output_tokens(self) -> int | None:
        """Number of generated tokens, by the rule in force."""
        if self.rules.count == "chunks":
            return len(self.text_times_s)
        return self._usage_number("completion_tokens")

    @property
    def prompt_tokens(self) -> int | None:
        """Number of prompt tokens by the server's account, None where it gives none."""
        return self._usage_number("prompt_tokens")

    @property
    def cached_tokens(self) -> int | None:
        """Number of prompt tokens the server found in its prefix cache, None where it does not say."""
        details = (self.usage or {}).get("prompt_tokens_details")
        value = details.get("cached_tokens") if isinstance(details, dict) else None
        return value if isinstance(value, int) else None

    def _usage_number(self, name: str) -> int | None:
        value = (self.usage or {}).get(name)
        return value if isinstance(value, int) else None


def _text_of(choice: dict[str, Any]) -> str:
    """Text of one choice of a chunk: completion text, chat content, or reasoning under either of its usual names."""
    delta = choice.get("delta")
    sources = (choice, delta) if isinstance(delta, dict) else (choice,)
    texts = (source.get(name) for source in sources for name in ("text", "content", "reasoning_content", "reasoning"))
    return next((text for text in texts if text and isinstance(text, str)), "")
