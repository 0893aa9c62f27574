"""The engine inside one's own process: submit prompts, read tokens, from any thread.

Keeps the vocabulary of transformers' ContinuousBatchingManager. Each request has its own record and its own readers, so
iterating one never takes or drops another's tokens. No socket, no timer; the engine thread is the only thread.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from common.errors import RequestError
from common.ids import new_request_id, new_seed
from common.params import SamplingParams
from common.wire import Event, Failed, Finished, Submit, Tokens, Usage
from worker.engine import Engine
from worker.engine_thread import EngineThread

MAX_KEPT_RESULTS = 4096
"""Finished requests that stay readable; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """What is known of one request: all tokens generated so far, and how it ended if it did.

    finish_reason: `stop`, `length`, `cancelled`, `error` (then `error` says why) or None while it runs.
    """

    request_id: str
    prompt_ids: list[int]
    generated_tokens: list[int]
    finish_reason: str | None = None
    usage: Usage | None = None
    error: RequestError | None = None

    @property
    def is_finished(self) -> bool:
        """Whether this is the last output of its request."""
        return self.finish_reason is not None


@dataclass(slots=True)
class _Record:
    prompt_ids: list[int]
    tokens: list[int] = field(default_factory=list)
    end: Finished | Failed | None = None

    def output(self, request_id: str) -> GenerationOutput:
        tokens = list(self.tokens)
        match self.end:
            case None:
                return GenerationOutput(request_id, self.prompt_ids, tokens)
            case Failed(code=code, message=message):
                error = RequestError(code, message)
                return GenerationOutput(request_id, self.prompt_ids, tokens, "error", error=error)
            case Finished(reason=reason, usage=usage):
                return GenerationOutput(request_id, self.prompt_ids, tokens, reason, usage)


class ContinuousBatchingManager:
    """Runs an engine on a thread of its own and keeps each request's tokens for its readers.

    Usable as a context manager: `with ContinuousBatchingManager(engine) as manager: …`.
    """

    def __init__(self, engine: Engine):
        self._thread = EngineThread(engine, self._receive)
        self._max_model_len = engine.max_model_len
        self._changed = threading.Condition()
        self._records: dict[str, _Record] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()

    def __enter__(self) -> "ContinuousBatchingManager":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> bool:
        """End the engine thread; live requests end as cancelled and their readers return. True if it ended in time."""
        return self._thread.stop(timeout_s)

    def add_request(
        self,
        prompt_ids: list[int],
        params: SamplingParams | None = None,
        max_tokens: int | None = None,
        request_id: str | None = None,
        stop_token_ids: list[int] | None = None,
        ignore_eos: bool = False,
        priority: int = 0,
    ) -> str:
        """Submit a prompt and return its request id. Without max_tokens the rest of the context is the limit.

        Raises ValueError for an id that is in use and RuntimeError after `stop`. A prompt that cannot be served is
        accepted here and ends at once with an error.
        """
        request_id = request_id or new_request_id()
        submit = Submit(
            id=request_id,
            topic="",
            prompt_ids=list(prompt_ids),
            params=params or replace(SamplingParams(), seed=new_seed()),
            max_tokens=max(1, self._max_model_len - len(prompt_ids)) if max_tokens is None else max_tokens,
            stop_token_ids=stop_token_ids or [],
            ignore_eos=ignore_eos,
            priority=priority,
        )
        with self._changed:
            if request_id in self._records:
                raise ValueError(f"request id {request_id} is in use")
            self._records[request_id] = _Record(submit.prompt_ids)
        try:
            self._thread.submit(submit)
        except RuntimeError:
            with self._changed:
                del self._records[request_id]
            raise
        return request_id

    def cancel(self, request_id: str) -> None:
        """End a request; unknown or finished ids are no error."""
        self._thread.cancel(request_id)

    def get_result(self, request_id: str, timeout_s: float | None = None) -> GenerationOutput | None:
        """Wait for a request's end and return its whole output, or None when the timeout passes first.

        Raises KeyError for an id that was never added or is long forgotten.
        """
        with self._changed:
            record = self._records[request_id]
            if not self._changed.wait_for(lambda: record.end is not None, timeout_s):
                return None
            return record.output(request_id)

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Yield the request's output whenever it has grown, the finished one last; waits while there is nothing new.

        Raises KeyError, at the call, for an id that was never added or is long forgotten.
        """
        with self._changed:
            record = self._records[request_id]
        return self._follow(request_id, record)

    def _follow(self, request_id: str, record: _Record) -> Iterator[GenerationOutput]:
        seen = 0
        while True:
            with self._changed:
                while record.end is None and len(record.tokens) == seen:
                    self._changed.wait()
                output = record.output(request_id)
            seen = len(output.generated_tokens)
            yield output
            if output.is_finished:
                return

    def _receive(self, events: list[Event]) -> None:
        """Take in the engine's events; runs on the engine thread."""
        with self._changed:
            for event in events:
                record = self._records.get(event.id)
                if record is None:
                    continue
                if isinstance(event, Tokens):
                    record.tokens.extend(event.ids)
                elif isinstance(event, (Finished, Failed)):
                    record.end = event
                    self._keep(event.id)
            self._changed.notify_all()

    def _keep(self, request_id: str) -> None:
        self._finished[request_id] = None
        while len(self._finished) > MAX_KEPT_RESULTS:
            oldest, _ = self._finished.popitem(last=False)
            del self._records[oldest]
