"""The open calls of a web process: every decision about them, without threads or sockets.

The reader feeds `take` with what arrived and calls `sweep` between; routes call `open` and, through their groups,
`cancel_calls` and `close_group`. One lock guards it all. `send` must not block: it returns False when the message
cannot leave now.

Repair: events are idempotent by `pos`, so anything may be asked for twice. A hole in a call's positions, or in the
topic's sequence numbers, makes calls stale; a Resync that names them is repeated until each is proved whole, by an
event that continues what it has. A call that was not accepted yet is repaired by sending its Submit again.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

from common.config import WebConfig
from common.errors import ErrorCode, RequestError
from common.ids import new_request_id
from common.wire import Batch, Cancel, Event, Failed, Have, Heartbeat, Message, Resync, ToWeb
from web.link.call import Call, CallGroup, CallSpec
from web.link.worker_view import WorkerView

log = logging.getLogger(__name__)

RESEND_INTERVAL_S = 0.5
RESYNC_INTERVAL_S = 0.5
CANCEL_INTERVAL_S = 1.0
ASK_AFTER_S = 10.0
"""A running call that was silent for so long is asked about: should the worker not know it, it says so."""

PAST_LIVES = 16
"""Earlier incarnations of the worker whose late messages are recognised."""


class Registry:
    """See the module."""

    def __init__(self, config: WebConfig, topic: str, send: Callable[[Message], bool]):
        self._config = config
        self._topic = topic
        self._send = send
        self._lock = threading.Lock()
        self._now = 0.0
        self._can_send = False
        self._calls: dict[str, Call] = {}
        self._groups: set[CallGroup] = set()
        self._stale: set[str] = set()
        self._resync_at_s = 0.0
        self._unsent_cancels: dict[str, Cancel] = {}
        self._worker = WorkerView(config.heartbeat_timeout_s)
        self._incarnation = ""
        self._past_lives: deque[str] = deque(maxlen=PAST_LIVES)
        self._seq = 0
        self.closing: RequestError | None = None
        """Why new calls are refused from now on, whatever the worker says. Set by the link when it drains."""

    # --- routes ---

    @property
    def worker(self) -> WorkerView:
        """What is known about the worker."""
        return self._worker

    @property
    def num_open(self) -> int:
        """Calls that are open."""
        return len(self._calls)

    def refusal(self) -> RequestError | None:
        """Return why no new call can be taken now, or None."""
        refusal = self.closing or self._worker.refusal(self._now)
        if not refusal and not self._can_send:
            return _takes_nothing()
        return refusal

    def open(self, specs: list[CallSpec], prefix: str) -> CallGroup:
        """Register calls and submit them. Raises RequestError at once when they cannot be taken."""
        limit = self._config.max_open_requests
        if len(specs) > limit:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"n: one request gets at most {limit} answers in all", "n")
        group = CallGroup(self, [(new_request_id(prefix), spec) for spec in specs])
        with self._lock:
            refusal = self.refusal()
            if refusal:
                raise refusal
            if len(self._calls) + len(specs) > limit:
                raise RequestError(ErrorCode.QUEUE_FULL, "too many requests are open")
            group.last_event_s = self._now
            self._groups.add(group)
            for call in group.calls:
                self._calls[call.id] = call
                call.submitted_s = self._now
                call.accept_by_s = self._now + self._config.accept_timeout_s
                if not self._submit(call):
                    self._forget(group, "not all of it could be sent")
                    raise _takes_nothing()
        return group

    def cancel_calls(self, calls: list[Call], reason: str) -> None:
        """Cancel calls; each still gets its terminal event, from the worker if that has accepted it."""
        with self._lock:
            for call in calls:
                if call.done or call.cancelled_at_s is not None:
                    continue
                call.cancelled_at_s = self._now
                self._cancel(call, reason)
                if not call.accepted:
                    call.end_cancelled()

    def close_group(self, group: CallGroup, reason: str) -> None:
        """Cancel what is live and forget the group."""
        with self._lock:
            self._forget(group, reason)

    # --- reader ---

    def take(self, message: ToWeb) -> None:
        """Take one message of the worker."""
        with self._lock:
            if not self._is_current(message.incarnation):
                return
            if isinstance(message, Heartbeat):
                self._take_heartbeat(message)
            else:
                self._take_batch(message)

    def sweep(self, now: float, can_send: bool) -> None:
        """Do what is due. Call only when everything that had arrived was taken: silence is judged here.

        can_send: whether the worker takes messages at the moment.
        """
        with self._lock:
            self._now = now
            self._can_send = can_send
            self._retry_cancels()
            self._resync()
            if self._worker.lost(now):
                self._give_up([call for call in self._live_calls() if call.accepted], _gone_away())
            for call in self._live_calls():
                self._sweep_call(call)
            for group in self._groups:
                if now - group.last_event_s >= self._config.ping_interval_s:
                    group.last_event_s = now
                    group.ping()

    def fail_all(self, error: RequestError) -> None:
        """End every open call with this error, and tell the worker."""
        with self._lock:
            self._give_up(self._live_calls(), error)

    # --- inside, under the lock ---

    def _live_calls(self) -> list[Call]:
        return [call for call in self._calls.values() if not call.done]

    def _submit(self, call: Call) -> bool:
        call.resend_at_s = self._now + RESEND_INTERVAL_S * 2**call.num_sent
        call.num_sent += 1
        return self._send(call.spec.to_submit(call.id, self._topic))

    def _cancel(self, call: Call, reason: str) -> None:
        message = Cancel(call.id, reason)
        if not self._send(message):
            self._unsent_cancels[call.id] = message

    def _retry_cancels(self) -> None:
        for name, message in list(self._unsent_cancels.items()):
            if not self._send(message):
                return
            del self._unsent_cancels[name]

    def _forget(self, group: CallGroup, reason: str) -> None:
        self._groups.discard(group)
        for call in group.calls:
            if self._calls.pop(call.id, None) and not call.done:
                call.done = True
                if call.cancelled_at_s is None:
                    self._cancel(call, reason)
            self._stale.discard(call.id)

    def _is_current(self, incarnation: str) -> bool:
        if incarnation in self._past_lives:
            return False
        if incarnation != self._incarnation:
            self._begin_life(incarnation)
        return True

    def _begin_life(self, incarnation: str) -> None:
        """Another worker process has taken over: it knows none of our calls."""
        if self._incarnation:
            log.warning("the worker was restarted with %d calls open", len(self._calls))
            self._past_lives.append(self._incarnation)
        self._incarnation = incarnation
        self._seq = 0
        self._stale.clear()
        self._unsent_cancels.clear()
        for call in self._live_calls():
            self._carry_over(call)

    def _carry_over(self, call: Call) -> None:
        """Decide what becomes of a call whose worker is gone. Resuming with the tokens it has belongs here."""
        if call.accepted:
            self._fail(call, RequestError(ErrorCode.WORKER_LOST, "the worker was restarted during this request"))
        else:
            self._submit(call)

    def _take_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._worker.heard(heartbeat, self._now)
        if heartbeat.seq != self._seq:
            self._seq = heartbeat.seq
            self._suspect_all()

    def _take_batch(self, batch: Batch) -> None:
        if batch.seq > self._seq + 1:
            self._suspect_all()
        self._seq = max(self._seq, batch.seq)
        for event in batch.events:
            call = self._calls.get(event.id)
            if call:
                self._take_event(call, event)

    def _take_event(self, call: Call, event: Event) -> None:
        call.group.last_event_s = call.heard_s = self._now
        if call.take(event):
            self._stale.discard(call.id)
        else:
            self._stale.add(call.id)

    def _suspect_all(self) -> None:
        self._stale.update(call.id for call in self._live_calls() if call.accepted)

    def _resync(self) -> None:
        if not self._stale or self._now < self._resync_at_s:
            return
        have = [Have(name, self._calls[name].num_received) for name in sorted(self._stale)]
        if self._send(Resync(self._topic, self._incarnation, have)):
            log.info("asked the worker to repeat the events of %d calls", len(have))
            self._resync_at_s = self._now + RESYNC_INTERVAL_S

    def _sweep_call(self, call: Call) -> None:
        if not call.accepted:
            self._sweep_unaccepted(call)
        elif call.cancelled_at_s is not None and self._now - call.cancelled_at_s >= CANCEL_INTERVAL_S:
            # The answer to a cancel is overdue: either message may be lost, so ask for both again.
            call.cancelled_at_s = self._now
            self._cancel(call, "repeated")
            self._stale.add(call.id)
        elif self._now - call.heard_s >= ASK_AFTER_S:
            call.heard_s = self._now
            self._stale.add(call.id)

    def _sweep_unaccepted(self, call: Call) -> None:
        if self._worker.busy_since(call.submitted_s, self._now):
            call.accept_by_s = self._now + self._config.accept_timeout_s
        if self._now >= call.accept_by_s:
            self._give_up([call], RequestError(ErrorCode.NOT_READY, "the worker did not answer in time"))
        elif self._now >= call.resend_at_s:
            self._submit(call)

    def _give_up(self, calls: list[Call], error: RequestError) -> None:
        for call in calls:
            self._cancel(call, error.message)
            self._fail(call, error)

    def _fail(self, call: Call, error: RequestError) -> None:
        log.warning("%s failed: %s", call.id, error.message)
        call.end(Failed.of(call.id, error))
        self._stale.discard(call.id)


def _gone_away() -> RequestError:
    return RequestError(ErrorCode.WORKER_LOST, "the worker has gone away")


def _takes_nothing() -> RequestError:
    return RequestError(ErrorCode.NOT_READY, "the worker takes no requests at the moment")
