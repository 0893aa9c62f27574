"""`tokenloom pull` and `tokenloom models`: fetch a catalogue model ahead of time; list what the catalogue has.

Shows progress as bars on a terminal, as lines elsewhere. Imports the worker's catalogue, never torch.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from worker.models.catalogue import load_catalogue
from worker.models.progress import Progress, ProgressLines, Report
from worker.models.pull import pull


def pull_model(name: str, cache_dir: Path) -> None:
    """Fetch a catalogue model into the cache and print where it is. Raises ModelError."""
    with reporter() as report:
        path = pull(name, cache_dir, report)
    print(path)


def list_models(cache_dir: Path) -> None:
    """Print the catalogue: name, size, licence, and whether the file is in the cache."""
    table = Table(box=None, pad_edge=False)
    for column in ("name", "size", "licence", "fetched"):
        table.add_column(column, no_wrap=True)
    table.add_column("what")
    for entry in load_catalogue().entries:
        here = (cache_dir / "downloads" / entry.file).exists()
        size = f"{entry.size_bytes / 1e6:.0f} MB"
        table.add_row(entry.name, size, entry.licence, "yes" if here else "no", entry.description)
    Console().print(table)


@contextmanager
def reporter() -> Iterator[Report]:
    """Give a callback that shows progress on standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield StageLines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, console=console) as bars:
        yield StageBars(bars)


class StageLines:
    """Prints a line for each stage and one every few seconds: for logs."""

    def __init__(self) -> None:
        self._lines = ProgressLines()

    def __call__(self, progress: Progress) -> None:
        """Show `progress`."""
        if line := self._lines.take(progress, time.monotonic()):
            print(line, file=sys.stderr, flush=True)


class StageBars:
    """One bar for each stage, its text the stage's latest message."""

    def __init__(self, bars: Bars):
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, progress: Progress) -> None:
        """Show `progress`."""
        total = progress.total or None
        if progress.stage not in self._tasks:
            self._tasks[progress.stage] = self._bars.add_task(progress.message, total=total)
        task = self._tasks[progress.stage]
        self._bars.update(task, description=progress.message, completed=progress.done, total=total)
