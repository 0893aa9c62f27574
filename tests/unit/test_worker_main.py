"""How a worker process starts: what has to be over before it serves."""

import subprocess
import sys

import pytest

from worker.main import run_and_end_thread

SCRIPT = """
import threading
import worker.main
from common.config import WorkerConfig

class Server:
    engine_alive = False
    def __init__(self, config): pass
    def start(self): pass
    def stop(self): pass
    def join(self): return 0
    def serve(self, loader, model): print(model, loader.is_alive(), loader is threading.main_thread())

worker.main.WorkerServer = Server
worker.main.run_worker(WorkerConfig(), lambda config: (threading.current_thread(), "loaded"))
"""


def test_the_thread_that_loaded_is_gone_before_the_engine_starts():
    """With its OpenMP threads: while they lived, those of the engine slept at every operation, for there were more
    than cores, and a third of the tokens per second was lost."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["loaded", "False", "False"]


def test_an_error_of_loading_is_raised():
    def fails() -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        run_and_end_thread(fails)
