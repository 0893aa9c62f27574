"""Definitions and statistics of the benchmark, against values worked out by hand."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cli.bench.report import latency_table, report_lines
from cli.bench.stats import RequestRecord, distribution, percentile, summarize


def record(index: int = 0, **changes: object) -> RequestRecord:
    """Asked for at 10 s, sent at 10.5 s, chunks at 12, 13, 13 and 15 s, ended at 16 s, five tokens."""
    values: dict = {
        "index": index,
        "start_s": 10.0,
        "sent_s": 10.5,
        "end_s": 16.0,
        "text_times_s": [12.0, 13.0, 13.0, 15.0],
    }
    values |= {"output_tokens": 5, "prompt_tokens": 8, "cached_tokens": 2, "finish_reason": "length"}
    return RequestRecord(**(values | changes))


def test_latencies_count_from_the_intended_start() -> None:
    """Open loop: half a second of late sending is part of TTFT and E2E (no coordinated omission)."""
    assert record().ttft_s == 2.0
    assert record().e2e_s == 6.0


def test_tpot_is_the_time_after_the_first_token_over_the_other_tokens() -> None:
    assert record().tpot_s == (6.0 - 2.0) / 4
    assert record(output_tokens=1).tpot_s is None
    assert record(text_times_s=[]).tpot_s is None


def test_itl_is_the_gaps_as_delivered() -> None:
    """Chunks of one read have gap 0 and are kept: the mean stays true."""
    assert record().itl_s == [1.0, 0.0, 2.0]
    assert record(text_times_s=[12.0]).itl_s == []


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (90, 3.7), (100, 4.0)])
def test_percentile_is_linear_between_ranks(percent: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], percent) == pytest.approx(value)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_stays_within_the_values_and_grows(values: list[float], percent: float) -> None:
    ordered = sorted(values)
    assert ordered[0] <= percentile(ordered, percent) <= ordered[-1] * (1 + 1e-12)
    assert percentile(ordered, percent) <= percentile(ordered, min(100, percent + 1)) * (1 + 1e-12)


def test_distribution_of_nothing_is_none() -> None:
    assert distribution([]) is None
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_failures_count_neither_as_throughput_nor_as_latency() -> None:
    """A failed request's tokens are not output; but its time is part of the run."""
    records = [
        record(0),
        record(1, end_s=20.0, error="no_done", detail="d", output_tokens=50),
        record(2, text_times_s=[], output_tokens=None, error="http_429", detail="busy"),
        record(3, output_tokens=3),
    ]
    summary = summarize(records, max_tokens=5)
    assert summary["duration_s"] == 10.0
    assert (summary["requests"], summary["succeeded"], summary["failed"]) == (4, 2, 2)
    assert summary["errors"] == {"http_429": 1, "no_done": 1}
    assert summary["error_samples"] == {"no_done": "d", "http_429": "busy"}
    assert summary["output_tokens"] == 8
    assert summary["output_tokens_per_s"] == pytest.approx(0.8)
    assert summary["requests_per_s"] == pytest.approx(0.2)
    assert summary["short_outputs"] == 1
    assert summary["tokens_per_chunk"] == 1.0
    assert summary["e2e_s"]["count"] == 2
    assert summary["itl_s"]["count"] == 6
    assert summary["send_lag_s"]["count"] == 4


def test_a_run_without_any_success_still_reports() -> None:
    """No division by nothing, and the failures are named on the terminal and in the JSON."""
    summary = summarize([record(0, error="connect", detail="refused", text_times_s=[])], max_tokens=5)
    assert json.loads(json.dumps(summary))["ttft_s"] is None
    assert any("connect" in line and "refused" in line for line in report_lines(summary))
    assert summarize([], max_tokens=5)["requests"] == 0


def test_the_report_warns_of_outputs_shorter_than_asked() -> None:
    """Two servers compare only at equal output lengths."""
    assert any("shorter" in line for line in report_lines(summarize([record()], max_tokens=6)))
    assert not any("shorter" in line for line in report_lines(summarize([record()], max_tokens=5)))


def test_the_table_shows_milliseconds() -> None:
    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(latency_table(summarize([record()], max_tokens=5)))
    shown = console.export_text()
    assert "TTFT" in shown
    assert "2000.0" in shown
    assert "6000.0" in shown
