"""The README's two commands, from a clean clone with a clean environment, and the README's curl lines.

Installs everything anew, as on a new machine; only pip's cache and the model's are reused.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.processes import ROOT, alive, end_family, family, free_port, wait_for

INSTALL_TIMEOUT_S = 900.0
TIMEOUT_S = 120.0

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]

KEPT = re.compile(
    r"HOME|LANG|LC_ALL|TMPDIR|XDG_CACHE_HOME|XDG_CONFIG_HOME|PIP_.*|UV_.*|SSL_.*|REQUESTS_CA_BUNDLE|"
    r".*_proxy|.*_PROXY|OPENBLAS_.*|PYENV_.*"
)


def clean_env() -> dict[str, str]:
    """Return what a fresh login has: no virtual environment, no settings of Tokenloom or Python."""
    env = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    path = os.environ["PATH"].split(os.pathsep)
    env["PATH"] = os.pathsep.join(folder for folder in path if not folder.startswith(sys.prefix + os.sep))
    return env


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of this checkout's last commit."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no git checkout, so there is nothing to clone")
    target = tmp_path_factory.mktemp("clone") / "tokenloom"
    git = ["git", "-c", "safe.directory=*", "clone", "--quiet", str(ROOT), str(target)]
    trusted = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    subprocess.run(git, env={**clean_env(), **trusted}, check=True, timeout=TIMEOUT_S)
    return target


@pytest.fixture(scope="module")
def served(clone: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`make serve` in the clone, once it has printed that it is ready: the process of make and the URL."""
    log = clone.with_name("serve.log")
    with open(log, "w") as out:
        process = subprocess.Popen(
            ["make", "serve", f"PORT={free_port()}"],
            cwd=clone,
            env=clean_env(),
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def ready() -> re.Match[str] | None:
        assert process.poll() is None, log.read_text()[-4000:]
        return re.search(r"^curl -N (http://127\.0\.0\.1:\d+)/", log.read_text(), re.MULTILINE)

    try:
        yield process, wait_for(ready, INSTALL_TIMEOUT_S, "the ready line").group(1)
    finally:
        end_family(process)


def readme_curls() -> list[str]:
    """Return the curl commands of the README's shell blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [block.strip() for block in blocks if block.startswith("curl ")]


def test_the_readme_has_curl_lines():
    """The test below is parametrized over them, and none would pass it too."""
    assert len(readme_curls()) >= 4


@pytest.mark.parametrize("command", readme_curls())
def test_each_curl_line_of_the_readme_works(served, command):
    """Pasted as it stands, but for the port, it gets a whole answer."""
    _, url = served
    command = command.replace("http://127.0.0.1:8000", url)
    assert url in command
    result = subprocess.run(
        ["bash", "-c", command.replace("curl ", "curl -sS --fail-with-body ", 1)],
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    if '"stream": true' in command:
        events = [line for line in result.stdout.splitlines() if line]
        assert all(line.startswith("data: ") for line in events)
        assert events[-1] == "data: [DONE]"
        deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in events[:-1]]
        assert "".join(delta.get("content") or "" for delta in deltas).strip()
    else:
        assert json.loads(result.stdout)["object"]


def test_make_serve_ends_with_zero_on_ctrl_c_in_the_middle_of_a_stream(served):
    """The server that make started ends in order and leaves no process."""
    process, url = served
    body = json.dumps({"prompt": "One,", "max_tokens": 2000, "ignore_eos": True, "stream": True})
    curl = ["curl", "-sSN", f"{url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    stream = subprocess.Popen(curl, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert stream.stdout is not None
    assert stream.stdout.readline().startswith("data: ")
    pids = family(process)
    (server,) = [child for child in psutil.Process(process.pid).children() if "serve" in child.cmdline()]
    server.send_signal(signal.SIGINT)
    rest = stream.stdout.read()
    stream.wait(timeout=TIMEOUT_S)
    assert rest.rstrip().endswith("data: [DONE]")
    assert process.wait(timeout=TIMEOUT_S) == 0
    assert [pid for pid in pids if alive(pid)] == []


def test_make_test_passes_in_the_clone(clone):
    """Lint and tests run from the clone alone. Only a few tests are chosen, or this one would run itself."""
    result = subprocess.run(
        ["make", "test", "PYTEST_ARGS=tests/unit/test_cli_restart.py"],
        cwd=clone,
        env=clean_env(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert re.search(r"\b4 passed\b", result.stdout.splitlines()[-1])


def test_a_second_install_has_nothing_to_do(clone):
    """The stamp files say so: make finds every target up to date."""
    question = ["make", "--question", ".venv/.dev.stamp"]
    assert subprocess.run(question, cwd=clone, env=clean_env(), timeout=TIMEOUT_S).returncode == 0


def test_make_alone_lists_the_targets(clone):
    """The first thing a person tries explains the rest."""
    shown = subprocess.run(["make"], cwd=clone, env=clean_env(), capture_output=True, text=True, timeout=TIMEOUT_S)
    for target in ("serve", "test", "lint", "test-unit", "chaos", "load", "bench-peers", "clean"):
        assert re.search(rf"^ +{target} ", shown.stdout, re.MULTILINE), target


def test_another_python_is_refused_with_a_clear_line(clone, tmp_path):
    """Python 3.10 would fail much later, with an error that says nothing."""
    old = tmp_path / "python3.10"
    old.write_text("#!/bin/sh\nexit 1\n")  # what the version check of a too old Python comes to
    old.chmod(0o755)
    command = ["make", "install", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"]
    result = subprocess.run(command, cwd=clone, env=clean_env(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert result.returncode != 0
    assert "needs Python 3.11, 3.12 or 3.13" in result.stderr
