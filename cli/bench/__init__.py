"""`tokenloom bench`: a load generator for any OpenAI-compatible server. docs/BENCHMARKS.md defines what it measures."""

from cli.bench.command import bench

__all__ = ["bench"]
