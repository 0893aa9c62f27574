"""When a dead child is started again, and after how long."""

import pytest

from cli.restart import EXIT_CONFIG, RestartPolicy


def test_delays_double_up_to_the_cap_and_start_over_after_a_healthy_while():
    """A child that keeps dying is started ever more rarely; one that ran well is started soon."""
    policy = RestartPolicy()
    delays = [policy.died(1, ready_for_s=1.0) for _ in range(7)]
    assert delays == [1, 2, 4, 8, 16, 30, 30]
    assert policy.died(-9, ready_for_s=3600.0) == 1
    assert policy.died(-9, ready_for_s=0.0) == 2


@pytest.mark.parametrize("ready_for_s", [0.0, 100.0])
def test_a_configuration_error_is_final(ready_for_s):
    """Exit code 2 is never answered by another start."""
    assert RestartPolicy().died(EXIT_CONFIG, ready_for_s) is None


def test_false_starts_are_limited_only_until_the_first_success():
    """Three deaths before ever being ready give up; once it has worked, the child is started for ever."""
    policy = RestartPolicy()
    assert policy.died(1, 0.0) == 1
    assert policy.died(1, 0.0) == 2
    assert policy.died(1, 0.0) is None
    proven = RestartPolicy()
    assert proven.died(1, 5.0) is not None
    assert all(proven.died(1, 0.0) is not None for _ in range(20))
