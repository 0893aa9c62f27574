"""How a summary looks: a table for people. The JSON form is the summary itself."""

from typing import Any

from rich.table import Table

ROWS = (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"), ("send lag", "send_lag_s"))
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def latency_table(summary: dict[str, Any]) -> Table:
    """Latencies of a run in milliseconds, a row a quantity."""
    table = Table(title="Latency (ms)")
    table.add_column("")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for label, key in ROWS:
        stats = summary[key]
        table.add_row(label, *(f"{stats[column] * 1000:.1f}" if stats else "–" for column in COLUMNS))
    return table


def report_lines(summary: dict[str, Any]) -> list[str]:
    """The counts, the rates, and whatever a reader must know before trusting them."""
    lines = [
        f"{summary['succeeded']} of {summary['requests']} requests succeeded in {summary['duration_s']:.2f} s",
        f"{summary['output_tokens_per_s']:.2f} output tokens/s, {summary['requests_per_s']:.3f} requests/s",
        f"{summary['prompt_tokens']} prompt tokens ({summary['cached_tokens']} cached), "
        f"{summary['output_tokens']} output tokens, {summary['tokens_per_chunk']:.2f} tokens per chunk",
    ]
    lines += [
        f"FAILED {number} × {kind}: {summary['error_samples'][kind]}" for kind, number in summary["errors"].items()
    ]
    if summary["short_outputs"]:
        lines.append(f"NOTE {summary['short_outputs']} outputs were shorter than asked: lengths were not fixed")
    return lines
