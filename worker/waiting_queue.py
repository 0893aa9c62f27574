"""The order in which waiting requests are admitted: by priority (a lower number goes first), then by arrival.

A preempted request keeps its arrival number, so it returns to the head of its priority. Runs on the engine thread.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from worker.request import RequestState


def rank(request: RequestState) -> tuple[int, int]:
    """Return the sort key of a request: what is smaller is served first and preempted last."""
    return request.priority, request.arrival


class WaitingQueue:
    """A sorted list: the queue is bounded, so inserting and exact removal cost next to nothing."""

    def __init__(self) -> None:
        self._requests: list[RequestState] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._requests)

    @property
    def head(self) -> RequestState | None:
        """The request to admit next."""
        return self._requests[0] if self._requests else None

    def add(self, request: RequestState) -> None:
        """Put a request in its place."""
        insort(self._requests, request, key=rank)

    def remove(self, request: RequestState) -> None:
        """Take out this very request. Raises ValueError when it is not here."""
        at = bisect_left(self._requests, rank(request), key=rank)
        if at == len(self._requests) or self._requests[at] is not request:
            raise ValueError(f"request {request.id} is not waiting")
        del self._requests[at]
