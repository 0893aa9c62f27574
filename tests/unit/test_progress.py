"""What long work says while it runs: sizes and percent, and never nothing for long."""

import logging
import time

from tests.support.processes import wait_for
from worker.main import ProgressLog
from worker.models.progress import LINE_INTERVAL_S, Progress, ProgressLines


def test_a_line_says_how_much_of_how_much():
    """Sizes and percent where they are known, the message alone where not; never more than all."""
    assert str(Progress("download", 123_000_000, 492_000_000, "fetching x")) == "fetching x: 123 of 492 MB (25%)"
    assert str(Progress("download", 500_000_000, 492_000_000, "fetching x")) == "fetching x: 492 of 492 MB (100%)"
    assert str(Progress("convert", 0, 0, "reading x")) == "reading x"


def test_reports_are_thinned_out_but_a_new_stage_is_said_at_once():
    """Work reports five times a second; a log gets what is new and a line every few seconds."""
    lines = ProgressLines()

    def at(now_s: float, done: int, message: str = "fetching") -> str | None:
        return lines.take(Progress("download", done * 10**6, 10 * 10**6, message), now_s)

    assert at(100.0, 0) == "fetching: 0 of 10 MB (0%)"
    assert at(100.2, 1) is None
    assert at(100.0 + LINE_INTERVAL_S, 4) == "fetching: 4 of 10 MB (40%)"
    assert at(104.1, 5) is None
    assert at(104.2, 5, "fetching more") == "fetching more: 5 of 10 MB (50%)"


def test_silent_work_is_said_to_go_on():
    """A stage that reports nothing, like the import of torch, still gets a line every few seconds."""
    lines = ProgressLines()
    assert lines.still(0.0) is None, "nothing has begun"
    lines.take(Progress("load", 0, 0, "importing torch"), 10.0)
    assert lines.still(10.0 + LINE_INTERVAL_S / 2) is None
    assert lines.still(10.0 + LINE_INTERVAL_S) == "importing torch — 4 s so far"
    assert lines.still(10.5 + LINE_INTERVAL_S) is None
    assert lines.still(10.0 + 2 * LINE_INTERVAL_S) == "importing torch — 8 s so far"


def test_the_workers_log_goes_on_by_itself(caplog, monkeypatch):
    """The thread behind it writes while the work keeps the caller's thread, and ends with the work."""
    monkeypatch.setattr("worker.models.progress.LINE_INTERVAL_S", 0.02)
    monkeypatch.setattr("worker.main.LINE_INTERVAL_S", 0.02)
    with caplog.at_level(logging.INFO, "worker.main"):
        with ProgressLog() as progress:
            progress.say("importing torch")
            wait_for(lambda: "so far" in caplog.text, 10.0, "a line from the thread")
        written = caplog.text
        time.sleep(0.1)
    assert caplog.text == written
