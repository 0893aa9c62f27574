"""What a web process knows about the worker, from its heartbeats.

Plain data without threads; the registry keeps it. Times come from the registry's clock, in seconds, which stands still
while this process is frozen, so that a process that was stopped for a while does not think the worker was.
"""

from common.errors import ErrorCode, RequestError
from common.wire import Heartbeat, ModelInfo

STEP_LIMIT_S = 30.0
"""A step that runs longer counts as hung."""

LOST_AFTER_TIMEOUTS = 5.0
"""Heartbeat timeouts after which open calls are given up; new ones are refused after the first already."""


class WorkerView:
    """The last heartbeat and how old it is."""

    def __init__(self, heartbeat_timeout_s: float):
        self._timeout_s = heartbeat_timeout_s
        self._last: Heartbeat | None = None
        self._last_s = 0.0

    @property
    def model(self) -> ModelInfo | None:
        """The model the worker last said it serves."""
        return self._last.model if self._last else None

    def heard(self, heartbeat: Heartbeat, now: float) -> None:
        """Take a heartbeat."""
        self._last, self._last_s = heartbeat, now

    def silent(self, now: float) -> bool:
        """Whether heartbeats have stopped for long enough to refuse new calls."""
        return self._last is None or now - self._last_s > self._timeout_s

    def lost(self, now: float) -> bool:
        """Whether heartbeats have stopped for so long that open calls are given up."""
        return now - self._last_s > self._timeout_s * LOST_AFTER_TIMEOUTS

    def busy_since(self, since: float, now: float) -> bool:
        """Whether the step in flight began before `since`, so that the engine cannot have seen anything newer."""
        if self._last is None or self.silent(now) or self._hung:
            return False
        return self._last.step_age_s > 0 and self._last_s - self._last.step_age_s <= since

    def refusal(self, now: float) -> RequestError | None:
        """Return why no new call can be taken, or None when the worker is ready."""
        if self._last is None:
            return RequestError(ErrorCode.NOT_READY, "the worker has not been heard of yet")
        if self.silent(now):
            return RequestError(ErrorCode.NOT_READY, f"the worker has been silent for {now - self._last_s:.1f} s")
        if self._last.state == "draining":
            return RequestError(ErrorCode.DRAINING, "the worker is shutting down")
        if self._last.state != "ready" or self._last.model is None:
            return RequestError(ErrorCode.NOT_READY, "the worker is loading the model")
        if self._hung:
            return RequestError(ErrorCode.NOT_READY, f"a step has been running for {self._last.step_age_s:.0f} s")
        return None

    @property
    def _hung(self) -> bool:
        return self._last is not None and self._last.step_age_s > STEP_LIMIT_S
