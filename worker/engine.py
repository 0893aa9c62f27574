"""The engine: scheduler and runner put together; a step is three calls.

Runs on the engine thread only. Never touches a socket.
"""

import logging
from dataclasses import asdict, dataclass, field

from common.errors import ErrorCode, RequestError, TokenloomError
from common.wire import Event, Submit
from worker.batch import Runner, build_batch
from worker.request import RequestState
from worker.scheduler import Scheduler

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 8
"""Steps that may fail one after another before the engine counts as broken."""


class EngineBroken(TokenloomError):
    """Step after step has failed: the device or the model is unusable and the process should end."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for heartbeats and metrics. counters: monotonic totals by name."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    step: int = 0
    counters: dict[str, int] = field(default_factory=dict)


class Engine:
    """Takes requests, runs steps, gives events."""

    def __init__(self, scheduler: Scheduler, runner: Runner):
        self._scheduler = scheduler
        self._runner = runner
        self._steps = 0
        self._failed_steps = 0
        self._failed_in_a_row = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return self._scheduler.has_work

    @property
    def max_model_len(self) -> int:
        """Tokens a request may have, prompt and answer together."""
        return self._scheduler.max_model_len

    @property
    def stats(self) -> EngineStats:
        """What the engine is doing now."""
        scheduler, cache = self._scheduler, self._scheduler.cache
        counters = asdict(scheduler.counters) | {"failed_steps": self._failed_steps}
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_blocks_used=cache.num_used,
            kv_blocks_total=cache.num_blocks,
            step=self._steps,
            counters=counters,
        )

    def add(self, submit: Submit) -> None:
        """Accept or refuse a request; the answer is an event. A live id is left as it is."""
        if submit.grammar is not None:
            self._scheduler.refuse(submit.id, RequestError(ErrorCode.INVALID_REQUEST, "grammars are not supported"))
            return
        self._scheduler.add(RequestState.from_submit(submit, self._scheduler.config.eos_token_ids))

    def cancel(self, request_id: str, reason: str = "") -> None:
        """End a request; an unknown id is no error. `reason` goes to the log."""
        if reason:
            log.debug("cancel %s: %s", request_id, reason)
        self._scheduler.cancel(request_id)

    def end_all(self, error: RequestError | None) -> None:
        """End every live request: with this error, or as cancelled when there is none."""
        for request in self._scheduler.live_requests():
            if error is None:
                self._scheduler.cancel(request.id)
            else:
                self._scheduler.fail(request, error)

    def step(self) -> None:
        """Compute one step. A step that raises fails its own requests and nothing else.

        Raises EngineBroken when too many steps in a row have failed.
        """
        plan = self._scheduler.schedule()
        if not plan:
            return
        try:
            result = self._runner.run(build_batch(plan, self._scheduler.cache.block_size))
        except Exception:  # whatever it was, the requests of this step end with an answer
            log.exception("step %d failed with %d requests in it", self._steps, len(plan))
            self._fail([item.request for item in plan])
        else:
            self._failed_in_a_row = 0
            self._scheduler.update(plan, result)
        self._steps += 1
        if not self._scheduler.has_work:
            self._scheduler.check()

    def take_events(self) -> list[Event]:
        """Return what happened since the last call, in order."""
        return self._scheduler.take_events()

    def _fail(self, requests: list[RequestState]) -> None:
        self._failed_steps += 1
        self._failed_in_a_row += 1
        broken = self._failed_in_a_row >= MAX_FAILED_STEPS
        error = RequestError(ErrorCode.INTERNAL_ERROR, "the step that computed this request failed")
        for request in requests:
            self._scheduler.fail(request, error)
        self._scheduler.check()
        if broken:
            raise EngineBroken(f"{self._failed_in_a_row} steps in a row have failed")
