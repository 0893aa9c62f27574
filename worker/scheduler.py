"""Decides what each step computes, and makes every transition in a request's life.

    add ──▶ WAITING ──schedule──▶ RUNNING ──update──▶ FINISHED
                ▲────── preempt ─────┘
    cancel, fail: from WAITING or RUNNING to FINISHED

There is no prefill phase and no decode phase: a request has `num_computed < num_tokens`, and each step hands out tokens
until they meet (the idea is from vLLM v1's scheduler). `finish` alone frees blocks and emits the one terminal event.

Owns the waiting queue, the running requests and the cache bookkeeping. Holds integers, never tensors; runs on the
engine thread.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from common.errors import ErrorCode, RequestError
from common.wire import Accepted, Event, Failed, Finished, PromptLogprobs, Timings, Tokens, Usage
from worker.batch import Scheduled, StepResult, scored_positions
from worker.kv_cache import KVCacheManager
from worker.request import RequestState, RequestStatus
from worker.waiting_queue import WaitingQueue, rank


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of a step and of what is admitted.

    max_model_len: tokens of prompt and answer together; the scheduler lowers it to what the whole cache holds.
    """

    max_batch_tokens: int
    max_batch_size: int
    max_queued_requests: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class Counters:
    """Totals since the start; they only grow."""

    accepted: int = 0
    refused: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    cancelled: int = 0
    failed: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0


@dataclass(slots=True)
class Scheduler:
    """Continuous batching over a paged cache: FIFO with priorities, decode first, chunked prefill, preemption."""

    config: SchedulerConfig
    cache: KVCacheManager
    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    running: list[RequestState] = field(default_factory=list)
    _live: dict[str, RequestState] = field(default_factory=dict)
    _events: list[Event] = field(default_factory=list)
    _arrivals: int = 0

    @property
    def max_model_len(self) -> int:
        """Tokens a request may have, prompt and answer together: the model's limit or the whole cache."""
        return min(self.config.max_model_len, self.cache.max_tokens)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self._live)

    def take_events(self) -> list[Event]:
        """Return what happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    # --- transitions --------------------------------------------------------------------------------------------------

    def add(self, request: RequestState) -> None:
        """Accept a request into the queue, or refuse it with a reason. Adding a live id again changes nothing."""
        if request.id in self._live:
            return
        problem = self._why_refused(request)
        if problem:
            self.refuse(request.id, problem)
            return
        self._arrivals += 1
        request.arrival = self._arrivals
        request.added_s = self.clock()
        request.status = RequestStatus.WAITING
        self._live[request.id] = request
        self.waiting.add(request)
        self.counters.accepted += 1
        self.counters.prompt_tokens += request.num_prompt
        self._events.append(Accepted(request.id))
        self._finish_if_done(request)

    def refuse(self, request_id: str, error: RequestError) -> None:
        """Answer a request that is not taken."""
        self.counters.refused += 1
        self._events.append(Failed.of(request_id, error))

    def schedule(self) -> list[Scheduled]:
        """Choose the tokens of the next step: running requests first, decodes before prefills, then new ones."""
        plan: list[Scheduled] = []
        preemptions = self.counters.preemptions
        budget = self._plan_running(plan, self.config.max_batch_tokens)
        # Where blocks have just run out, admitting another request would only preempt the next one.
        if self.counters.preemptions == preemptions:
            self._plan_waiting(plan, budget)
        return plan

    def update(self, plan: list[Scheduled], result: StepResult) -> None:
        """Take in what a step computed: one id for each planned request whose last token was reached, in order.

        An id outside the vocabulary says that the row's logits were unusable; it fails that request alone.
        """
        sampled = enumerate(result.token_ids)
        scored = iter(result.prompt_logprobs)
        for item in plan:
            request = item.request
            request.prompt_logprobs.extend(islice(scored, len(scored_positions(item))))
            self.cache.commit(request, item.num_new)
            if request.num_computed < request.num_tokens:
                continue
            index, token = next(sampled)
            if not 0 <= token < self.config.vocab_size:
                self.fail(request, RequestError(ErrorCode.INTERNAL_ERROR, "the model gave no usable next token"))
                continue
            if not request.first_token_s:
                request.first_token_s = self.clock()
            if request.scores_prompt and not request.num_generated:
                self._events.append(PromptLogprobs(request.id, request.prompt_logprobs))
            logprobs = [result.logprobs[index]] if index in result.logprobs else []
            self._events.append(Tokens(request.id, request.num_generated, [token], logprobs))
            request.tokens.append(token)
            self.counters.generated_tokens += 1
            self._finish_if_done(request)

    def preempt(self, request: RequestState) -> None:
        """Send a running request back to the queue: its blocks go, its tokens stay and are computed again later."""
        self.running.remove(request)
        self.cache.free(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.waiting.add(request)
        self.counters.preemptions += 1

    def cancel(self, request_id: str) -> None:
        """End a live request at the client's wish; an unknown id is no error."""
        request = self._live.get(request_id)
        if request is not None:
            self.finish(request, self._ended(request, "cancelled"))

    def fail(self, request: RequestState, error: RequestError) -> None:
        """End a live request with an error."""
        self.finish(request, Failed.of(request.id, error))

    def finish(self, request: RequestState, event: Finished | Failed) -> None:
        """The one way out: free what the request holds and emit its terminal event."""
        del self._live[request.id]
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.cache.free(request)
        request.status = RequestStatus.FINISHED
        self._count(event)
        self._events.append(event)

    def live_requests(self) -> Iterable[RequestState]:
        """Return the requests that have no terminal event yet."""
        return list(self._live.values())

    # --- the parts of the above ---------------------------------------------------------------------------------------

    def _why_refused(self, request: RequestState) -> RequestError | None:
        if not request.num_prompt:
            return RequestError(ErrorCode.INVALID_REQUEST, "the prompt is empty")
        if min(request.tokens) < 0 or max(request.tokens) >= self.config.vocab_size:
            return RequestError(ErrorCode.INVALID_REQUEST, "the prompt has token ids outside the vocabulary")
        if request.params.largest_id() >= self.config.vocab_size:
            return RequestError(ErrorCode.INVALID_REQUEST, "the parameters name token ids outside the vocabulary")
        if request.num_prompt + request.max_tokens > self.max_model_len:
            return RequestError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the maximum context length is {self.max_model_len} tokens; "
                f"the prompt has {request.num_prompt} and {request.max_tokens} more were asked for",
            )
        if len(self.waiting) >= self.config.max_queued_requests:
            return RequestError(ErrorCode.QUEUE_FULL, f"{len(self.waiting)} requests are waiting already")
        return None

    def _plan_running(self, plan: list[Scheduled], budget: int) -> int:
        """Plan the running requests, preempting where a block is lacking; return what is left of the budget."""
        for request in sorted(self.running, key=lambda r: (r.num_tokens - r.num_computed > 1, rank(r))):
            if request.status is not RequestStatus.RUNNING or not budget:
                continue
            while request.status is RequestStatus.RUNNING and not self.cache.grow(request):
                # Only a decode can lack a block, and decodes are planned oldest first: no victim is in the plan yet.
                self.preempt(max(self.running, key=rank))
            if request.status is RequestStatus.RUNNING:
                budget -= _put(plan, request, budget)
        return budget

    def _plan_waiting(self, plan: list[Scheduled], budget: int) -> None:
        """Admit waiting requests in their order while the budget and the cache allow."""
        while budget and len(self.running) < self.config.max_batch_size:
            head = self.waiting.head
            # Each running request keeps a block to grow into; without it, admitting one would soon preempt another.
            if head is None or not self.cache.admit(head, reserve_blocks=len(self.running)):
                return
            self._start(head)
            budget -= _put(plan, head, budget)

    def _start(self, request: RequestState) -> None:
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        if request.num_preemptions:
            return
        request.scheduled_s = self.clock()
        request.num_cached = request.num_computed
        self.counters.prefix_queried_tokens += request.num_prompt
        self.counters.prefix_hit_tokens += request.num_cached

    def _finish_if_done(self, request: RequestState) -> None:
        last = request.tokens[-1] if request.num_generated else None
        if last in request.end_ids:
            self.finish(request, self._ended(request, "stop"))
        elif request.num_generated >= request.max_tokens:
            self.finish(request, self._ended(request, "length"))

    def _ended(self, request: RequestState, reason: str) -> Finished:
        now = self.clock()
        started = request.scheduled_s or now
        first = request.first_token_s or now
        usage = Usage(request.num_prompt, request.num_generated, min(request.num_cached, request.num_prompt))
        return Finished(request.id, reason, usage, Timings(started - request.added_s, first - started, now - first))

    def _count(self, event: Finished | Failed) -> None:
        if isinstance(event, Failed):
            self.counters.failed += 1
        elif event.reason == "stop":
            self.counters.finished_stop += 1
        elif event.reason == "length":
            self.counters.finished_length += 1
        else:
            self.counters.cancelled += 1

    def check(self) -> None:
        """Raise AssertionError unless every live request is in exactly one place and the cache's books balance."""
        places = [(r.id, RequestStatus.WAITING) for r in self.waiting] + [
            (r.id, RequestStatus.RUNNING) for r in self.running
        ]
        if sorted(id for id, _ in places) != sorted(self._live):
            raise AssertionError("live requests are not exactly those that wait or run")
        for request_id, status in places:
            request = self._live[request_id]
            if request.status is not status:
                raise AssertionError(f"{request_id} is {request.status} but listed as {status}")
            if status is RequestStatus.WAITING and (request.block_table or request.num_computed):
                raise AssertionError(f"{request_id} holds blocks while it waits")
        self.cache.check(self.running)
        if not self._live and self.cache.num_used:
            raise AssertionError("idle, but blocks are held")


def _put(plan: list[Scheduled], request: RequestState, budget: int) -> int:
    """Plan as many of the request's missing tokens as the budget allows; return how many."""
    num_new = min(request.num_tokens - request.num_computed, budget)
    plan.append(Scheduled(request, num_new))
    return num_new
