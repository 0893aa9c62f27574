"""A worker process from start to end: bind, load the model, serve, stop.

The main thread has the model loaded and then waits. Signals go to a thread of their own, because loading spends seconds
at a time where Python handles none; the io thread (worker/server.py) does the talking. A supervisor that wants the
worker to die with it says so when it starts it (cli/child.py does).
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from common.config import WorkerConfig
from common.logs import set_up_logging
from common.wire import ModelInfo
from worker.engine import Engine
from worker.models.progress import LINE_INTERVAL_S, Progress, ProgressLines
from worker.openmp import spin_briefly
from worker.server import WorkerServer

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

T = TypeVar("T")

Load = Callable[[WorkerConfig], tuple[Engine, ModelInfo]]


def load_engine(config: WorkerConfig) -> tuple[Engine, ModelInfo]:
    """Resolve and load `config.model`. Raises ModelError or ConfigError."""
    from worker.models.resolve import resolve_model

    started_s = time.monotonic()
    with ProgressLog() as progress:
        resolved = resolve_model(config, progress)
        progress.say("importing torch")
        spin_briefly(os.environ)
        # Importing torch takes seconds and is needed only now.
        from worker.assemble import build_engine

        built = build_engine(config, resolved, progress.say)
    log.info("%s is loaded, %.1f s after the start", resolved.id, time.monotonic() - started_s)
    return built


def run_worker(config: WorkerConfig, load: Load = load_engine) -> int:
    """Run a worker until SIGINT or SIGTERM and return the exit code of the process.

    0 after a signal: every accepted request has had its terminal event by then. Other codes are in worker/server.py.
    Raises ConfigError and ModelError when it cannot start. SIGINT and SIGTERM stay blocked afterwards, so that a second
    one cannot disturb the end of the process.
    """
    set_up_logging(config.log_level)
    server = WorkerServer(config)
    # Before any thread starts, for they inherit it: only the thread that waits for a signal gets one.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    server.start()
    loaded = threading.Event()
    threading.Thread(target=_stop_on_signal, args=(server, loaded), name="signals", daemon=True).start()
    try:
        engine, model = run_and_end_thread(lambda: load(config))
    except BaseException:
        server.stop()
        server.join()
        raise
    loaded.set()
    server.serve(engine, model)
    exit_code = server.join() or 0
    if server.engine_alive:
        _exit_now(exit_code)
    return exit_code


def run_and_end_thread(work: Callable[[], T]) -> T:
    """Do this work in a thread of its own, and return what it returns or raise what it raises.

    OpenMP keeps a team of threads for each thread that ever computed. The team of the thread that loaded the model
    would count for as long as that lives; with more threads than cores they no longer spin for each other but sleep at
    every operation, which cost a third of the tokens per second.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="load") as pool:
        return pool.submit(work).result()


class ProgressLog:
    """Writes progress to the log, and that it still goes on when a stage says nothing, from a thread of its own.

    A context manager; between its ends there is a line every few seconds, whatever the work does.
    """

    def __init__(self) -> None:
        self._lines = ProgressLines()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> "ProgressLog":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def __call__(self, progress: Progress) -> None:
        """Take a report; quick, and mostly silent."""
        with self._lock:
            self._write(self._lines.take(progress, time.monotonic()))

    def say(self, message: str) -> None:
        """Take a line that starts a stage of unknown length."""
        self(Progress("load", 0, 0, message))

    def _run(self) -> None:
        while not self._over.wait(LINE_INTERVAL_S / 8):
            with self._lock:
                self._write(self._lines.still(time.monotonic()))

    def _write(self, line: str | None) -> None:
        if line:
            log.info("%s", line)


def _stop_on_signal(server: WorkerServer, loaded: threading.Event) -> None:
    number = signal.sigwait(STOP_SIGNALS)
    log.info("stopping after %s", signal.Signals(number).name)
    server.stop()
    exit_code = server.join() or 0
    if not loaded.is_set():
        _exit_now(exit_code)  # the main thread is deep in loading and cannot be interrupted


def _exit_now(exit_code: int) -> None:
    """End the process without waiting for threads that nothing can interrupt; all that matters has been sent."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
