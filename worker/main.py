"""A worker process from start to end: bind, load the model, serve, stop.

The main thread loads the model and then waits. Signals go to a thread of their own, because loading spends seconds at a
time where Python handles none; the io thread (worker/server.py) does the talking. A supervisor that wants the worker to
die with it says so when it starts it (cli/child.py does).
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from common.config import WorkerConfig
from common.wire import ModelInfo
from worker.engine import Engine
from worker.models.progress import Progress
from worker.server import WorkerServer
from worker.threads import spin_briefly

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPORT_INTERVAL_S = 2.0

Load = Callable[[WorkerConfig], tuple[Engine, ModelInfo]]


def load_engine(config: WorkerConfig) -> tuple[Engine, ModelInfo]:
    """Resolve and load `config.model`. Raises ModelError or ConfigError."""
    from worker.models.resolve import resolve_model

    started_s = time.monotonic()
    resolved = resolve_model(config, ProgressLog())
    spin_briefly(os.environ)
    # Importing torch takes seconds and is needed only now.
    from worker.assemble import build_engine

    engine, model = build_engine(config, resolved.path, log.info)
    log.info("%s is ready after %.1f s", resolved.id, time.monotonic() - started_s)
    return engine, replace(model, id=resolved.id)


def run_worker(config: WorkerConfig, load: Load = load_engine) -> int:
    """Run a worker until SIGINT or SIGTERM and return the exit code of the process.

    0 after a signal: every accepted request has had its terminal event by then. Other codes are in worker/server.py.
    Raises ConfigError and ModelError when it cannot start. SIGINT and SIGTERM stay blocked afterwards, so that a second
    one cannot disturb the end of the process.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    server = WorkerServer(config)
    # Before any thread starts, for they inherit it: only the thread that waits for a signal gets one.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    server.start()
    loaded = threading.Event()
    threading.Thread(target=_stop_on_signal, args=(server, loaded), name="signals", daemon=True).start()
    try:
        engine, model = load(config)
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


class ProgressLog:
    """Writes progress to the log: the first word of each stage, then a line every few seconds."""

    def __init__(self) -> None:
        self._stage = ""
        self._log_at_s = 0.0

    def __call__(self, progress: Progress) -> None:
        """Take a report; quick, and mostly silent."""
        now = time.monotonic()
        if progress.stage != self._stage or now >= self._log_at_s:
            self._stage = progress.stage
            self._log_at_s = now + REPORT_INTERVAL_S
            log.info("%s", progress)


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
