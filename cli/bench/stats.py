"""The measured quantities: their definitions, and their statistics over a run.

Pure functions and plain dataclasses; every time is in seconds on one monotonic clock. docs/BENCHMARKS.md tells a reader
the same definitions.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTILES = (50, 90, 95, 99)


@dataclass
class RequestRecord:
    """One request as the client saw it. `error` is "" for a success, else the kind of failure.

    `start_s` is where its latencies count from: the moment it was sent in a closed loop, the moment the schedule asked
    for it in an open loop (so a late send is charged to the server under test, not forgotten: no coordinated omission).
    `text_times_s` holds the arrival of each chunk that carried text.
    """

    index: int
    start_s: float
    sent_s: float
    end_s: float
    text_times_s: list[float] = field(default_factory=list)
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str = ""
    error: str = ""
    detail: str = ""

    @property
    def ok(self) -> bool:
        """True when the stream came whole."""
        return not self.error

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from the start to the first chunk with real text."""
        return self.text_times_s[0] - self.start_s if self.text_times_s else None

    @property
    def e2e_s(self) -> float:
        """End-to-end latency: from the start to the end of the response body."""
        return self.end_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (E2E − TTFT) / (n − 1). None for fewer than two tokens."""
        if self.ttft_s is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the gaps between consecutive text chunks as delivered, never divided by tokens.

        Chunks that one read delivered together have gap 0. A chunk of several tokens is one gap; `tokens_per_chunk` of
        the summary says how far chunks stand for tokens, and TPOT is the figure per token.
        """
        return [late - early for early, late in zip(self.text_times_s, self.text_times_s[1:], strict=False)]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of sorted values, linear between closest ranks (what numpy calls "linear").

    Raises ValueError for no values.
    """
    if not ordered:
        raise ValueError("no values")
    rank = (len(ordered) - 1) * percent / 100
    low, high = math.floor(rank), math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Count, mean, percentiles and extremes of some values; None when there are none."""
    if not values:
        return None
    ordered = sorted(values)
    stats = {"count": float(len(ordered)), "mean": math.fsum(ordered) / len(ordered), "min": ordered[0]}
    return stats | {f"p{p}": percentile(ordered, p) for p in PERCENTILES} | {"max": ordered[-1]}


def summarize(records: Sequence[RequestRecord], max_tokens: int) -> dict[str, Any]:
    """Every figure of a run, as plain JSON values. Only successes count as throughput and latency; failures by kind.

    The run lasts from the first start to the last end, failures included. `short_outputs` counts successes with fewer
    than `max_tokens` tokens: with any, the lengths were not fixed and rows of two servers may not compare.
    """
    good = [r for r in records if r.ok]
    duration_s = max(r.end_s for r in records) - min(r.start_s for r in records) if records else 0.0
    output_tokens = sum(r.output_tokens or 0 for r in good)
    text_chunks = sum(len(r.text_times_s) for r in good)
    return {
        "duration_s": duration_s,
        "requests": len(records),
        "succeeded": len(good),
        "failed": len(records) - len(good),
        "errors": dict(sorted(Counter(r.error for r in records if not r.ok).items())),
        "error_samples": _error_samples(records),
        "requests_per_s": len(good) / duration_s if duration_s else 0.0,
        "output_tokens_per_s": output_tokens / duration_s if duration_s else 0.0,
        "output_tokens": output_tokens,
        "prompt_tokens": sum(r.prompt_tokens or 0 for r in good),
        "cached_tokens": sum(r.cached_tokens or 0 for r in good),
        "tokens_per_chunk": output_tokens / text_chunks if text_chunks else 0.0,
        "short_outputs": sum((r.output_tokens or 0) < max_tokens for r in good),
        "finish_reasons": dict(sorted(Counter(r.finish_reason for r in good).items())),
        "ttft_s": distribution([r.ttft_s for r in good if r.ttft_s is not None]),
        "itl_s": distribution([gap for r in good for gap in r.itl_s]),
        "tpot_s": distribution([r.tpot_s for r in good if r.tpot_s is not None]),
        "e2e_s": distribution([r.e2e_s for r in good]),
        "send_lag_s": distribution([r.sent_s - r.start_s for r in records]),
    }


def _error_samples(records: Sequence[RequestRecord]) -> dict[str, str]:
    """The first detail seen of each kind of failure."""
    samples: dict[str, str] = {}
    for record in records:
        if not record.ok:
            samples.setdefault(record.error, record.detail)
    return samples
