"""A worker in memory, for tests of the web side: it answers the wire messages as the real one does.

`ScriptedWorker` generates a fixed, checkable token sequence; the test decides when it runs and what is lost.
"""

from dataclasses import dataclass, field

from common.errors import ErrorCode
from common.wire import (
    Accepted,
    Batch,
    Cancel,
    Event,
    Failed,
    Finished,
    Heartbeat,
    Message,
    ModelInfo,
    Resync,
    Submit,
    Tokens,
    Usage,
)

MODEL = ModelInfo("fake", "/models/fake", 4096, 1000)


def token(prompt_ids: list[int], index: int) -> int:
    """The token at an index of the answer to a prompt."""
    return (sum(prompt_ids) * 31 + index * 7) % 1000


def answer(prompt_ids: list[int], count: int) -> list[int]:
    return [token(prompt_ids, index) for index in range(count)]


def heartbeat(incarnation: str = "first", state: str = "ready", seq: int = 0, step_age_s: float = 0.0) -> Heartbeat:
    model = None if state == "loading" else MODEL
    return Heartbeat(incarnation, state, seq, model, 1, step_age_s, 0, 0, 0, 8)


@dataclass
class Run:
    """One request inside the worker."""

    submit: Submit
    num_generated: int = 0
    terminal: Event | None = None


@dataclass
class ScriptedWorker:
    """Takes messages, makes batches."""

    incarnation: str = "first"
    seq: int = 0
    runs: dict[str, Run] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def take(self, message: Message) -> None:
        if isinstance(message, Submit):
            if message.id in self.runs:
                self.replay(message.id, 0)
            else:
                self.runs[message.id] = Run(message)
                self.events.append(Accepted(message.id))
        elif isinstance(message, Cancel):
            self.cancel(message.id)
        elif isinstance(message, Resync) and message.incarnation == self.incarnation:
            for have in message.requests:
                self.replay(have.id, have.have)

    def cancel(self, request_id: str) -> None:
        run = self.runs.get(request_id)
        if run and not run.terminal:
            self.end(run, "cancelled")

    def replay(self, request_id: str, have: int) -> None:
        run = self.runs.get(request_id)
        if run is None:
            self.events.append(Failed(request_id, ErrorCode.UNKNOWN_REQUEST, "unknown"))
            return
        self.events.append(Accepted(request_id))
        if run.num_generated > have:
            ids = answer(run.submit.prompt_ids, run.num_generated)[have:]
            self.events.append(Tokens(request_id, have, ids))
        if run.terminal:
            self.events.append(run.terminal)

    def step(self) -> None:
        """Every live request gets its next token."""
        for run in self.runs.values():
            if run.terminal is None:
                self.events.append(
                    Tokens(run.submit.id, run.num_generated, [token(run.submit.prompt_ids, run.num_generated)])
                )
                run.num_generated += 1
                if run.num_generated == run.submit.max_tokens:
                    self.end(run, "length")

    def end(self, run: Run, reason: str) -> None:
        run.terminal = Finished(run.submit.id, reason, Usage(len(run.submit.prompt_ids), run.num_generated))
        self.events.append(run.terminal)

    def batch(self) -> Batch | None:
        """What has happened since the last one."""
        if not self.events:
            return None
        self.seq += 1
        events, self.events = self.events, []
        return Batch(self.incarnation, self.seq, events)

    def heartbeat(self) -> Heartbeat:
        return heartbeat(self.incarnation, seq=self.seq)

    @property
    def num_live(self) -> int:
        return sum(run.terminal is None for run in self.runs.values())
