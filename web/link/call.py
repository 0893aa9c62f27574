"""One call to the worker, and the group of calls that serves one HTTP request.

A `Call` turns the worker's events, which may be repeated or have holes, into each token once and in order. A
`CallGroup` is what a route works with: it waits in the request's own thread or greenlet, and is filled by the reader.
Neither touches a socket; the registry sends for them.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import RequestError
from common.params import SamplingParams
from common.wire import Event, Failed, Finished, PromptLogprobs, Submit, Tokens, Usage
from web.link.disconnect import DisconnectWatcher

GroupEvent = PromptLogprobs | Tokens | Finished | Failed


class ClientGone(Exception):
    """The client has hung up; nobody is left to answer."""


@dataclass(frozen=True, slots=True)
class CallSpec:
    """What one call asks of the worker. deadline: Unix time in seconds, or None."""

    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    priority: int = 0
    tenant: str = ""
    num_logprobs: int | None = None
    prompt_logprobs: bool = False
    deadline: float | None = None

    def to_submit(self, request_id: str, topic: str) -> Submit:
        """Return the wire message that starts this call."""
        return Submit(
            id=request_id,
            topic=topic,
            prompt_ids=self.prompt_ids,
            params=self.params,
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            priority=self.priority,
            tenant=self.tenant,
            num_logprobs=self.num_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            deadline=self.deadline,
        )


@dataclass(slots=True, eq=False)
class Call:
    """One request of the worker as this process knows it. Times are the registry's clock, in seconds.

    num_received: tokens passed on so far, which is also the `pos` the next ones must have. prompt_received: whether the
    prompt's log-probabilities were passed on, which come before them if they were asked for.
    """

    id: str
    index: int
    spec: CallSpec
    group: "CallGroup"
    submitted_s: float = 0.0
    heard_s: float = 0.0
    accept_by_s: float = 0.0
    resend_at_s: float = 0.0
    num_sent: int = 0
    accepted: bool = False
    done: bool = False
    num_received: int = 0
    prompt_received: bool = False
    cancelled_at_s: float | None = None

    def take(self, event: Event) -> bool:
        """Take the next event for this call. Returns False when something before it is missing; it is then dropped."""
        if self.done:
            return True
        if isinstance(event, Tokens):
            return self._take_tokens(event)
        if isinstance(event, PromptLogprobs):
            self.accept()
            if not self.prompt_received:
                self.prompt_received = True
                self.group.put(self.index, event)
            return True
        if isinstance(event, Failed):
            self.end(event)
        elif isinstance(event, Finished):
            if event.usage.completion_tokens > self.num_received:
                self.accept()
                return False
            self.end(event)
        else:
            self.accept()
        return True

    def _take_tokens(self, event: Tokens) -> bool:
        self.accept()
        known = self.num_received - event.pos
        if known < 0 or (self.spec.prompt_logprobs and not self.prompt_received):
            return False
        if known < len(event.ids):
            new = event.since(self.num_received)
            self.num_received += len(new.ids)
            self.group.put(self.index, new)
        return True

    def accept(self) -> None:
        """Note that the worker has this call."""
        if not self.accepted:
            self.accepted = True
            self.group.wake()

    def end(self, event: Finished | Failed) -> None:
        """Pass on the terminal event, once."""
        if not self.done:
            self.done = True
            self.group.put(self.index, event)

    def end_cancelled(self) -> None:
        """End here, without the worker: it was cancelled before the worker answered."""
        self.end(Finished(self.id, "cancelled", Usage(len(self.spec.prompt_ids), self.num_received)))


class GroupOwner(Protocol):
    """What a group asks of the registry."""

    def cancel_calls(self, calls: list[Call], reason: str) -> None:
        """Cancel these calls; each still gets its terminal event."""
        ...

    def close_group(self, group: "CallGroup", reason: str) -> None:
        """Cancel what is live and forget the group."""
        ...


class CallGroup:
    """The calls of one HTTP request with one inbox. Used by one thread; filled by the reader."""

    def __init__(self, owner: GroupOwner, named_specs: list[tuple[str, CallSpec]]):
        self._owner = owner
        self.calls = [Call(name, index, spec, self) for index, (name, spec) in enumerate(named_specs)]
        self._lock = threading.Lock()
        # queue.SimpleQueue is looked up here because gevent replaces it; it holds one token when the waiter must look.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._woken = False
        self._pending: dict[int, list[GroupEvent]] = {}
        self._ping_due = False
        self._gone = False
        self._unwatch: Callable[[], None] | None = None
        self.last_event_s = 0.0

    @property
    def ids(self) -> list[str]:
        """The request ids of the calls, in order."""
        return [call.id for call in self.calls]

    # --- the waiting side ---

    def wait_accepted(self) -> None:
        """Return once the worker has accepted every call.

        Raises RequestError when one is refused or the worker does not answer, ClientGone when the client left.
        """
        while True:
            with self._lock:
                failed = [event for events in self._pending.values() for event in events if isinstance(event, Failed)]
            if self._gone:
                raise ClientGone
            if failed:
                raise RequestError(failed[0].code, failed[0].message)
            if all(call.accepted or call.done for call in self.calls):
                return
            self._wait()

    def events(self) -> Iterator[tuple[int, GroupEvent] | None]:
        """Yield (index of the call, event), in order for each call, until every call has ended.

        None means that a ping is due. Raises ClientGone when the client left.
        """
        live = len(self.calls)
        self._ping_due = False
        while live:
            if self._gone:
                raise ClientGone
            with self._lock:
                pending, self._pending = self._pending, {}
                ping_due, self._ping_due = self._ping_due, False
            for index, events in pending.items():
                for event in events:
                    live -= isinstance(event, Finished | Failed)
                    yield index, event
            if pending:
                continue
            if ping_due:
                yield None
            self._wait()

    def cancel(self, index: int | None = None, reason: str = "") -> None:
        """Cancel one call, or all of them. Each still gets its terminal event."""
        self._owner.cancel_calls(self.calls if index is None else [self.calls[index]], reason)

    def close(self) -> None:
        """End everything: cancel what is live, forget the calls, stop watching the client. Harmless when repeated."""
        if self._unwatch:
            self._unwatch()
            self._unwatch = None
        self._owner.close_group(self, "closed")

    def _wait(self) -> None:
        self._wake.get()
        with self._lock:
            self._woken = False

    # --- the filling side: reader and watcher ---

    def watch(self, watcher: DisconnectWatcher, fd: int) -> None:
        """Have the client's socket watched until `close`."""
        self._unwatch = lambda: watcher.unwatch(fd)
        try:
            watcher.watch(fd, self.client_gone)
        except (OSError, ValueError):  # it is closed already
            self.client_gone()

    def put(self, index: int, event: GroupEvent) -> None:
        """Add an event of one call. Tokens that nobody has taken yet are merged, so a slow client costs little."""
        with self._lock:
            events = self._pending.setdefault(index, [])
            if isinstance(event, Tokens) and events and isinstance(events[-1], Tokens):
                events[-1].ids.extend(event.ids)
                events[-1].logprobs.extend(event.logprobs)
            else:
                events.append(event)
        self.wake()

    def wake(self) -> None:
        """Make the waiter look."""
        with self._lock:
            if self._woken:
                return
            self._woken = True
        self._wake.put(None)

    def ping(self) -> None:
        """Say that the client has heard nothing for a while."""
        self._ping_due = True
        self.wake()

    def client_gone(self) -> None:
        """End everything, for a client that has hung up: nobody is left to take what would still come."""
        self._gone = True
        self._owner.close_group(self, "the client left")
        self.wake()
