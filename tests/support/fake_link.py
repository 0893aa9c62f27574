"""The worker's side as routes see it, without sockets or threads.

An answer is a function: the id of the next token of the ids so far (prompt and answer), or None for the end by EOS.
`FakeLink` keeps every call that was opened, so that a test sees what the worker would have been asked.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from common.errors import ErrorCode, RequestError
from common.ids import new_request_id
from common.wire import Failed, Finished, Logprobs, ModelInfo, PromptLogprobs, Tokens, Usage
from tests.support.fake_runner import fake_logprobs
from web.link.call import CallSpec, GroupEvent

NextId = Callable[[CallSpec, list[int]], int | None]
"""From a call and the ids generated so far to the next id, or None where the model ends."""


def say(ids: list[int]) -> NextId:
    """Answer with these ids, then end."""
    return lambda spec, done: ids[len(done)] if len(done) < len(ids) else None


@dataclass
class FakeGroup:
    """The calls of one HTTP request; each step gives each live call `per_step` tokens."""

    link: "FakeLink"
    specs: list[CallSpec]
    ids: list[str]
    cancelled: dict[int, str] = field(default_factory=dict)
    closed: bool = False

    def wait_accepted(self) -> None:
        if self.link.refusal:
            raise self.link.refusal

    def events(self) -> Iterator[tuple[int, GroupEvent] | None]:
        generated: dict[int, list[int]] = {index: [] for index in range(len(self.specs))}
        for index, spec in enumerate(self.specs):
            if spec.prompt_logprobs:
                told = [fake_logprobs(token_id, spec.num_logprobs or 0) for token_id in spec.prompt_ids[1:]]
                yield index, PromptLogprobs(self.ids[index], told)
        while generated:
            if self.link.pings:
                yield None
            for index in list(generated):
                done = generated[index]
                pos = len(done)
                reason = self._step(index, done)
                if done[pos:]:
                    yield index, Tokens(self.ids[index], pos, done[pos:], self._logprobs(index, done[pos:]))
                if self.link.fails_after is not None and len(done) >= self.link.fails_after:
                    del generated[index]
                    yield index, Failed(self.ids[index], ErrorCode.INTERNAL_ERROR, "the step failed")
                elif reason:
                    del generated[index]
                    usage = Usage(len(self.specs[index].prompt_ids), len(done), self.link.cached_tokens)
                    yield index, Finished(self.ids[index], reason, usage)

    def _logprobs(self, index: int, ids: list[int]) -> list[Logprobs]:
        count = self.specs[index].num_logprobs
        return [] if count is None else [fake_logprobs(token_id, count) for token_id in ids]

    def _step(self, index: int, done: list[int]) -> str:
        spec = self.specs[index]
        for _ in range(self.link.per_step):
            if index in self.cancelled:
                return "cancelled"
            token = self.link.next_id(spec, done)
            if token is None:
                return "stop"
            done.append(token)
            if token in spec.stop_token_ids:
                return "stop"
            if len(done) == spec.max_tokens:
                return "length"
        return ""

    def cancel(self, index: int | None = None, reason: str = "") -> None:
        for each in range(len(self.specs)) if index is None else [index]:
            self.cancelled[each] = reason

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeLink:
    """Stands in for web.link's Link."""

    model: ModelInfo | None
    next_id: NextId = field(default_factory=lambda: say([]))
    per_step: int = 1
    cached_tokens: int = 0
    pings: bool = False
    fails_after: int | None = None
    refusal: RequestError | None = None
    refusal_at_once: RequestError | None = None
    not_ready: str = ""
    groups: list[FakeGroup] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        return not self.not_ready

    def why_not_ready(self) -> str:
        return self.not_ready

    def open(self, specs: list[CallSpec], prefix: str, client_socket: object) -> FakeGroup:
        if self.refusal_at_once:
            raise self.refusal_at_once
        group = FakeGroup(self, specs, [new_request_id(prefix) for _ in specs])
        self.groups.append(group)
        return group
