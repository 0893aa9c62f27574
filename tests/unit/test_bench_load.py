"""Arrival schedules and loops of the benchmark, on a scripted clock or with events; no wall time is asserted."""

import asyncio
import statistics

import pytest

from cli.bench.load import arrival_schedule, closed_loop, open_loop
from cli.bench.stats import RequestRecord


def finished(index: int, start_s: float = 0.0) -> RequestRecord:
    return RequestRecord(index=index, start_s=start_s, sent_s=start_s, end_s=start_s)


def test_arrivals_are_poisson_seeded_and_increasing() -> None:
    """The same seed gives the same schedule; gaps have mean 1/rate and the spread of an exponential."""
    arrivals = arrival_schedule(4.0, seed=1, requests=20_000)
    assert arrivals == arrival_schedule(4.0, seed=1, requests=20_000)
    assert arrivals != arrival_schedule(4.0, seed=2, requests=20_000)
    gaps = [late - early for early, late in zip([0.0, *arrivals], arrivals, strict=False)]
    assert min(gaps) > 0
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.03)


def test_a_schedule_stops_at_whichever_limit_comes_first() -> None:
    by_time = arrival_schedule(4.0, seed=1, duration_s=10.0)
    assert by_time
    assert max(by_time) < 10.0
    assert arrival_schedule(4.0, seed=1, requests=3, duration_s=10.0) == by_time[:3]
    assert arrival_schedule(4.0, seed=1, requests=10_000, duration_s=10.0) == by_time
    with pytest.raises(ValueError, match="duration"):
        arrival_schedule(4.0, seed=1)


def test_closed_loop_keeps_exactly_the_concurrency_in_flight() -> None:
    """Never more than c at once, c whenever that many are left, and each index once."""
    in_flight, peak, order = 0, 0, []

    async def send(index: int, intended_s: float | None) -> RequestRecord:
        nonlocal in_flight, peak
        assert intended_s is None
        in_flight += 1
        peak = max(peak, in_flight)
        order.append(index)
        for _ in range(1 + index % 3):
            await asyncio.sleep(0)
        in_flight -= 1
        return finished(index)

    records = asyncio.run(closed_loop(send, concurrency=4, requests=21))
    assert peak == 4
    assert order == list(range(21))
    assert sorted(r.index for r in records) == list(range(21))


def test_closed_loop_with_a_duration_lets_those_in_flight_finish() -> None:
    """Nothing starts after the duration; nothing started is thrown away."""
    now_s = 0.0

    async def send(index: int, intended_s: float | None) -> RequestRecord:
        nonlocal now_s
        await asyncio.sleep(0)
        now_s += 1.0
        return finished(index, now_s)

    records = asyncio.run(closed_loop(send, concurrency=2, duration_s=5.0, clock=lambda: now_s))
    assert 5 <= len(records) <= 6
    assert [r.index for r in records] == list(range(len(records)))


def test_open_loop_does_not_wait_for_the_server() -> None:
    """All requests are out while none has finished, and each carries its intended arrival, not its late send."""
    arrivals = [0.0, 0.001, 0.002, 0.003]
    everyone_in = asyncio.Event()
    intended: dict[int, float] = {}

    async def send(index: int, intended_s: float | None) -> RequestRecord:
        assert intended_s is not None
        intended[index] = intended_s
        if len(intended) == len(arrivals):
            everyone_in.set()
        await asyncio.wait_for(everyone_in.wait(), 10)
        return finished(index, intended_s)

    records = asyncio.run(open_loop(send, arrivals))
    assert [r.index for r in records] == [0, 1, 2, 3]
    assert [intended[i] - intended[0] for i in range(4)] == pytest.approx(arrivals)


def test_loops_without_a_limit_are_refused() -> None:
    async def send(index: int, intended_s: float | None) -> RequestRecord:
        raise AssertionError("never sent")

    with pytest.raises(ValueError, match="duration"):
        asyncio.run(closed_loop(send, concurrency=1))
