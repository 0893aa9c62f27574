"""The clock that both sides judge silence by, over a clock that the test turns."""

from common.clock import AwakeClock


def test_time_in_which_nothing_ran_does_not_count():
    """Short gaps count in full; an hour in a SIGSTOP counts as the longest gap, and time goes on after it."""
    now_s = 100.0
    clock = AwakeClock(0.25, lambda: now_s)
    readings = []
    for gap_s in (0.0, 0.125, 0.25, 3600.0, 0.125):
        now_s += gap_s
        readings.append(clock.read())
    assert readings == [0.0, 0.125, 0.375, 0.625, 0.75]
