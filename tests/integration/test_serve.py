"""`tokenloom serve` as a person uses it: the real worker, the real Gunicorn, signals and deaths at bad moments."""

import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes import alive, end_family, family, wait_for
from tests.support.serve import START_TIMEOUT_S, TIMEOUT_S, Serve

pytestmark = pytest.mark.model


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    started: list[Serve] = []

    def start(*arguments: str) -> Serve:
        directory = tmp_path / str(len(started))
        directory.mkdir()
        started.append(Serve(directory, *arguments))
        return started[-1]

    yield start
    for one in started:
        end_family(one.process)


def sockets_left() -> set[Path]:
    """Return the private folders of running or badly ended servers."""
    bases = {Path(os.environ.get("XDG_RUNTIME_DIR") or "/nowhere"), Path("/tmp")}
    return {path for base in bases if base.is_dir() for path in base.glob("tokenloom-*/submit.sock")}


def test_the_printed_line_works_as_it_stands(serve):
    """--port 0 takes a free port and prints the real one; the curl line pasted into a shell streams an answer."""
    running = serve("--port", "0").wait_ready()
    result = subprocess.run(
        [*shlex.split(running.curl_line()), "-sS", "--fail-with-body"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    events = [line.removeprefix("data: ") for line in result.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["object"] == "chat.completion.chunk"


@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_streams_ends_everything(serve, stop_signal):
    """Exit code 0, every stream gets an end, no process and no socket is left.

    The signal goes to the whole process group, as a terminal's Ctrl-C does.
    """
    before = sockets_left()
    running = serve("--port", "0", "--graceful-timeout-s", "1").wait_ready()
    streams = [running.stream(max_tokens=4000) for _ in range(3)]
    for _, response in streams:
        assert response.status == 200
        assert response.readline().startswith(b"data: ")
    pids = family(running.process)
    assert len(pids) >= 4
    os.killpg(running.process.pid, stop_signal)
    for connection, response in streams:
        assert response.read().rstrip().endswith(b"data: [DONE]")
        connection.close()
    assert running.process.wait(timeout=TIMEOUT_S) == 0
    assert [pid for pid in pids if alive(pid)] == []
    assert sockets_left() <= before


def test_a_signal_while_the_model_loads_ends_everything(serve):
    """Changing one's mind early is no error either."""
    running = serve("--port", "0")
    wait_for(lambda: len(family(running.process)) >= 3, START_TIMEOUT_S, "the children's start")
    pids = family(running.process)
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.process.wait(timeout=TIMEOUT_S) == 0
    assert [pid for pid in pids if alive(pid)] == []


def test_a_killed_worker_is_started_again(serve):
    """The web tier stays, says that it is not ready, and serves again with the new worker."""
    running = serve("--port", "0").wait_ready()
    web, worker = running.child("web"), running.child("worker")
    worker.kill()
    wait_for(lambda: running.status("/ready") == 503, TIMEOUT_S, "not being ready")
    assert running.status("/health") == 200
    wait_for(lambda: "Ready again" in running.output, START_TIMEOUT_S, "being ready again")
    connection, response = running.stream(max_tokens=4)
    assert response.read().rstrip().endswith(b"data: [DONE]")
    connection.close()
    assert running.child("web").pid == web.pid
    assert running.child("worker").pid != worker.pid


def test_a_killed_supervisor_leaves_nothing(serve):
    """kill -9 gives no chance to clean up; the children must see to it themselves."""
    running = serve("--port", "0", "--graceful-timeout-s", "1").wait_ready()
    pids = family(running.process)
    running.process.kill()
    running.process.wait(timeout=TIMEOUT_S)
    wait_for(lambda: not any(alive(pid) for pid in pids), TIMEOUT_S, "the children's end")


def test_a_busy_port_is_named_before_anything_starts(serve):
    """One line, exit code 2; no model is loaded for a server that cannot listen."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        running = serve("--port", str(port))
        assert running.process.wait(timeout=TIMEOUT_S) == 2
    (line,) = running.errors.splitlines()
    assert line.startswith(f"tokenloom: --port: {port} on 127.0.0.1 is already in use; choose another, as in --port ")
    assert line.endswith(" make serve")
    assert running.output == ""


@pytest.mark.parametrize("model", ["nosuchname", "no/such/folder", "./missing.gguf"])
def test_a_name_that_is_no_model_is_said_before_anything_starts(serve, model):
    """One line that names the setting and what to do, exit code 2, no child process, no port taken."""
    running = serve("--model", model, "--port", "0")
    pids = set()
    while running.process.poll() is None:
        pids.update(family(running.process))
    assert running.process.wait(timeout=TIMEOUT_S) == 2
    assert pids <= {running.process.pid}
    (line,) = running.errors.splitlines()
    assert line.startswith(f"tokenloom: --model: {model!r} is not in the catalogue")
    assert "`tokenloom models`" in line
    assert "hub id" in line
    assert running.output == ""


def test_a_model_that_cannot_be_served_ends_the_start(serve, tmp_path):
    """The worker's reason is shown once, and the whole ends with exit code 2 instead of trying again."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "nosuchtype"}')
    (tmp_path / "broken" / "model.safetensors").touch()
    running = serve(str(tmp_path / "broken"), "--port", "0")
    assert running.process.wait(timeout=START_TIMEOUT_S) == 2
    assert "nosuchtype" in running.errors
    assert "Traceback" not in running.errors
    assert "starting it again" not in running.errors
