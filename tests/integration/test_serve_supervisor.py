"""The supervisor keeps its children running and ends them in order, whatever they and the user do."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT, alive, end_family, wait_for

TIMEOUT_S = 30.0

Spec = dict[str, object]

WEB: Spec = {"name": "web", "code": "until_told('web')"}
WORKER: Spec = {"name": "worker", "code": "until_told('worker')"}


class Supervised:
    """A running supervisor, the log its children write, and its output."""

    def __init__(self, directory: Path, specs: list[Spec], *prefix: str):
        self.directory = directory
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.support.supervised", str(directory), json.dumps(specs)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def log(self) -> list[str]:
        path = self.directory / "log"
        return path.read_text().splitlines() if path.exists() else []

    def pids(self, name: str) -> list[int]:
        return [int(line.split()[2]) for line in self.log() if line.startswith(f"{name} starts ")]

    def wait_started(self, name: str, times: int = 1) -> int:
        """Return the process id of the child's latest start."""
        wait_for(lambda: len(self.pids(name)) >= times, TIMEOUT_S, f"start {times} of {name}")
        return self.pids(name)[-1]

    def wait_end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, output


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[object]:
    started: list[Supervised] = []

    def start(*specs: Spec, prefix: tuple[str, ...] = ()) -> Supervised:
        started.append(Supervised(tmp_path, list(specs), *prefix))
        return started[-1]

    yield start
    for one in started:
        for name in ("web", "worker"):
            for pid in one.pids(name):
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
        end_family(one.process)


@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_web_before_worker_and_the_exit_code_is_zero(supervise, stop_signal):
    """Streams are served by web out of the worker, so web goes first; nothing is left."""
    running = supervise(WEB, WORKER)
    pids = [running.wait_started("web"), running.wait_started("worker")]
    running.process.send_signal(stop_signal)
    exit_code, output = running.wait_end()
    assert exit_code == 0
    assert running.log()[-2:] == ["web ends", "worker ends"]
    assert "closed" in output, "the listening socket must not outlive the web tier"
    assert not any(alive(pid) for pid in pids)


def test_sigint_counts_in_a_scripts_background_job(supervise):
    """A script's shell starts `tokenloom serve &` with SIGINT ignored; `kill -INT` must end it all the same."""
    running = supervise(WEB, WORKER, prefix=("sh", "-c", 'trap "" INT; exec "$@"', "sh"))
    running.wait_started("web")
    running.wait_started("worker")
    running.process.send_signal(signal.SIGINT)
    assert running.wait_end()[0] == 0


def test_under_nohup_the_terminals_end_is_ignored(supervise):
    """With nohup the server outlives its terminal."""
    running = supervise(WEB, WORKER, prefix=("nohup",))
    web, worker = running.wait_started("web"), running.wait_started("worker")
    running.process.send_signal(signal.SIGHUP)
    os.kill(worker, signal.SIGKILL)
    running.wait_started("worker", times=2)  # it still watches over its children
    assert running.pids("web") == [web]
    running.process.send_signal(signal.SIGTERM)
    assert running.wait_end()[0] == 0


def test_a_child_that_does_not_end_is_killed_after_its_time(supervise):
    """A hung child must not hang the stop."""
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); say(f'web starts {os.getpid()}'); time.sleep(600)"
    running = supervise({"name": "web", "code": deaf, "stop_timeout_s": 0.2}, WORKER)
    pid = running.wait_started("web")
    running.wait_started("worker")
    running.process.send_signal(signal.SIGINT)
    exit_code, _ = running.wait_end()
    assert exit_code == 0
    assert running.log()[-1] == "worker ends"
    assert not alive(pid)


def test_a_second_signal_kills_at_once(supervise):
    """Pressing Ctrl-C again does not wait for the children's time to run out."""
    deaf = "signal.signal(signal.SIGTERM, lambda *_: say('web is deaf')); say(f'web starts {os.getpid()}')\n"
    running = supervise({"name": "web", "code": deaf + "while True: time.sleep(1)", "stop_timeout_s": 600}, WORKER)
    pid = running.wait_started("web")
    running.process.send_signal(signal.SIGINT)
    wait_for(lambda: "web is deaf" in running.log(), TIMEOUT_S, "the first signal's arrival")
    running.process.send_signal(signal.SIGINT)
    exit_code, _ = running.wait_end()
    assert exit_code == 0
    assert not alive(pid)


def test_a_child_that_dies_is_started_again_and_the_other_stays(supervise):
    """A worker that is killed comes back without the web tier being touched."""
    running = supervise(WEB, WORKER)
    web, worker = running.wait_started("web"), running.wait_started("worker")
    (running.directory / "ready").touch()
    assert running.process.stdout.readline() == "ready\n"
    os.kill(worker, signal.SIGKILL)
    again = running.wait_started("worker", times=2)
    assert again != worker
    assert running.pids("web") == [web]
    line = ""
    while line != "ready\n":  # announced again, after the line that tells of the death
        line = running.process.stdout.readline()
        assert line, "the output ended"
    running.process.send_signal(signal.SIGTERM)
    assert running.wait_end()[0] == 0


def test_a_child_with_a_configuration_error_ends_the_rest(supervise):
    """Exit code 2 says that another try cannot help; it becomes the exit code of the whole."""
    running = supervise(WEB, {"name": "worker", "code": "say('worker tries'); time.sleep(0.3); sys.exit(2)"})
    exit_code, _ = running.wait_end()
    assert exit_code == 2
    assert running.log().count("worker tries") == 1
    assert not any(alive(pid) for pid in running.pids("web"))


def test_a_child_that_never_becomes_ready_is_given_up_after_three_tries(supervise):
    """A worker that crashes while it loads must not be started for ever."""
    running = supervise(WEB, {"name": "worker", "code": "say('worker tries'); sys.exit(7)"})
    exit_code, output = running.wait_end()
    assert exit_code == 1
    assert running.log().count("worker tries") == 3
    assert "worker exited with code 7" in output
    assert not any(alive(pid) for pid in running.pids("web"))


def test_killing_the_supervisor_ends_the_children(supervise):
    """kill -9 lets nothing run on as an orphan that holds the port and the memory."""
    running = supervise(WEB, WORKER)
    pids = [running.wait_started("web"), running.wait_started("worker")]
    running.process.kill()
    running.process.wait(timeout=TIMEOUT_S)
    wait_for(lambda: not any(alive(pid) for pid in pids), TIMEOUT_S, "the children's end")


def test_what_a_dead_child_left_behind_is_ended_too(supervise):
    """Gunicorn's processes must not outlive a Gunicorn that was killed."""
    code = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], preexec_fn=lambda: say("
    code += "f'web starts {os.getpid()}')); until_told('worker')"
    running = supervise({"name": "worker", "code": code})
    grandchild, child = running.wait_started("web"), running.wait_started("worker")
    os.kill(child, signal.SIGKILL)
    wait_for(lambda: not alive(grandchild), TIMEOUT_S, "the grandchild's end")
    running.process.send_signal(signal.SIGTERM)
    assert running.wait_end()[0] == 0
