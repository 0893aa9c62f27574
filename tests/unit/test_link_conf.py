"""What Gunicorn is told, from the TOKENLOOM_ variables."""

import os
import runpy
import signal
import subprocess
import sys
from typing import Any

import pytest

from common.errors import ConfigError


def settings(monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, Any]:
    """The names of the configuration module, read as Gunicorn reads it."""
    for name, value in variables.items():
        monkeypatch.setenv(f"TOKENLOOM_{name.upper()}", value)
    return runpy.run_module("web.gunicorn_conf")


def test_settings_come_from_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting of the web tier reaches Gunicorn."""
    names = settings(
        monkeypatch, host="0.0.0.0", port="8123", web_workers="3", web_worker_class="gthread", web_threads="9"
    )
    assert names["bind"] == "0.0.0.0:8123"
    assert (names["workers"], names["worker_class"], names["threads"]) == (3, "gthread", 9)


def test_address_with_colons_is_bracketed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An IPv6 address and a port cannot be told apart otherwise."""
    assert settings(monkeypatch, host="::1", port="80")["bind"] == "[::1]:80"


def test_limits_leave_room_for_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gunicorn must not cut what the link still ends with an answer, nor stop accepting below our limit."""
    names = settings(monkeypatch, graceful_timeout_s="12.5", max_open_requests="2000")
    assert names["graceful_timeout"] > 12.5
    assert names["worker_connections"] > 2000
    assert names["preload_app"] is False


def test_bad_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong value stops the start with the name of the setting."""
    with pytest.raises(ConfigError, match="TOKENLOOM_WEB_WORKERS"):
        settings(monkeypatch, web_workers="none")


STARTING = """
import os, signal, sys, time
import web.gunicorn_conf as conf
conf.on_starting(None)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
    signal.signal(number, lambda *_: None)  # like Gunicorn's master, which only queues it
pid = os.fork()
if pid == 0:
    time.sleep(5)
    os._exit(7)
os.kill(pid, int(sys.argv[1]))
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
os.kill(os.getpid(), int(sys.argv[1]))  # the master keeps its own handler
sys.exit(code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_ends_a_process_that_has_only_been_forked(number: signal.Signals) -> None:
    """A worker that fails as soon as it starts ends the web tier while that is still forking: no signal is lost."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TOKENLOOM_")}
    command = [sys.executable, "-c", STARTING, str(int(number))]
    result = subprocess.run(command, env={**env, "PYTHONPATH": os.getcwd()}, timeout=30, check=False)
    assert result.returncode == 0
