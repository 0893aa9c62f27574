"""Who sends when: the closed loop and the open loop.

Owns the order of sends on one asyncio loop; knows nothing of HTTP. `send(index, intended_s)` performs one request and
never raises; the loops start it and collect what it returns.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator

from cli.bench.stats import RequestRecord

Send = Callable[[int, float | None], Awaitable[RequestRecord]]


def poisson_arrivals(rate_per_s: float, seed: int) -> Iterator[float]:
    """Arrival times in seconds of a Poisson process, without end: independent exponential gaps of mean 1/rate."""
    rng = random.Random(seed)
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate_per_s)
        yield at_s


def arrival_schedule(
    rate_per_s: float, seed: int, requests: int | None = None, duration_s: float | None = None
) -> list[float]:
    """The arrivals of one open-loop run: the first `requests` of them, those before `duration_s`, or both limits.

    Raises ValueError without any limit.
    """
    if requests is None and duration_s is None:
        raise ValueError("an open loop needs a number of requests or a duration")
    arrivals = itertools.islice(poisson_arrivals(rate_per_s, seed), requests)
    return list(arrivals if duration_s is None else itertools.takewhile(lambda at_s: at_s < duration_s, arrivals))


async def closed_loop(
    send: Send,
    concurrency: int,
    requests: int | None = None,
    duration_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[RequestRecord]:
    """Keep `concurrency` requests in flight: a finished one is replaced at once.

    No new one starts after `requests` in all or after `duration_s`; those in flight then run to their end.
    """
    if requests is None and duration_s is None:
        raise ValueError("a closed loop needs a number of requests or a duration")
    indexes: Iterator[int] = itertools.count() if requests is None else iter(range(requests))
    stop_s = None if duration_s is None else clock() + duration_s
    records: list[RequestRecord] = []

    async def user() -> None:
        while stop_s is None or clock() < stop_s:
            index = next(indexes, None)
            if index is None:
                return
            records.append(await send(index, None))

    await asyncio.gather(*(user() for _ in range(concurrency)))
    return records


async def open_loop(
    send: Send, arrivals: list[float], clock: Callable[[], float] = time.perf_counter
) -> list[RequestRecord]:
    """Send request i at arrival i whatever the server does: as many are in flight as it leaves unfinished.

    Each latency counts from the intended arrival, so a queue at the server, or in this process, cannot hide.
    """
    begin_s = clock()
    tasks = []
    for index, arrival_s in enumerate(arrivals):
        await asyncio.sleep(max(0.0, begin_s + arrival_s - clock()))
        tasks.append(asyncio.create_task(_send(send, index, begin_s + arrival_s)))
    return list(await asyncio.gather(*tasks))


async def _send(send: Send, index: int, intended_s: float) -> RequestRecord:
    return await send(index, intended_s)
