"""How a worker process starts: what has to be over before it serves."""

import subprocess
import sys

import pytest

from common.config import WorkerConfig
from worker.main import run_and_end_thread
from worker.server import EXIT_IO_DIED, WorkerServer

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


@pytest.mark.parametrize("broken", ["_beat", "_publish", "_take_messages"])
@pytest.mark.parametrize("when", ["serving", "ending"])
def test_an_io_thread_that_breaks_ends_the_process_with_its_own_code(tmp_path, monkeypatch, caplog, broken, when):
    """Not with 0, whatever part of it breaks: a supervisor would take that for an end that was asked for."""
    config = WorkerConfig(
        submit_endpoint=f"ipc://{tmp_path}/submit.sock",
        publish_endpoint=f"ipc://{tmp_path}/publish.sock",
        heartbeat_interval_s=0.05,
    )
    server = WorkerServer(config)

    def fails(*args: object) -> None:
        if when == "serving" or server._stopping.is_set():
            raise RuntimeError("broken")

    monkeypatch.setattr(server, broken, fails)
    server.start()
    if when == "ending":
        server.stop()
    assert server.join(20) == EXIT_IO_DIED
    assert "the io thread ends" in caplog.text
