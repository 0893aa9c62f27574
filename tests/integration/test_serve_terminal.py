"""`tokenloom serve` in a terminal, with a tiny model: what is shown, and Ctrl-C at every moment."""

import http.client
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.terminal import CTRL_C, Terminal
from tests.support.tiny_folder import write_model

START_TIMEOUT_S = 120.0
TIMEOUT_S = 60.0

LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) [a-z_.]+: \S")
TOLD = re.compile(r"Ready( again)? at |curl |\^C")
COLOURS = re.compile(r"\x1b\[[\d;]*m")

Start = Callable[..., Terminal]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny-chat")


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny-base", template=None)


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Terminal] = []

    def serve(model: Path, *flags: str) -> Terminal:
        command = [sys.executable, "-m", "cli", "serve", str(model), "--port", "0", "--graceful-timeout-s", "1"]
        started.append(Terminal([*command, *flags]))
        return started[-1]

    yield serve
    for terminal in started:
        terminal.close()


def lines_of(terminal: Terminal) -> list[str]:
    """Return the lines shown, without colours."""
    return [line for line in COLOURS.sub("", terminal.text).split("\n") if line.strip()]


def check_stopped(terminal: Terminal) -> None:
    """Exit code 0, nothing left running, nothing shown but log lines and what is told on purpose."""
    assert terminal.process.wait(timeout=TIMEOUT_S) == 0, terminal.text
    assert terminal.left() == []
    odd = [line for line in lines_of(terminal) if not LOG_LINE.match(line) and not TOLD.match(line)]
    assert odd == []


def stream(terminal: Terminal) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Start a stream that would go on for long."""
    found = re.search(r"curl -N http://127\.0\.0\.1:(\d+)/", terminal.text)
    assert found is not None
    connection = http.client.HTTPConnection("127.0.0.1", int(found.group(1)), timeout=TIMEOUT_S)
    body = {"prompt": "One,", "max_tokens": 16000, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def test_the_web_tier_alone_says_where_it_listens() -> None:
    """`tokenloom web` by itself, as in a container: one line with the address, also of a port that was chosen."""
    terminal = Terminal([sys.executable, "-m", "cli", "web", "--port", "0"])
    try:
        terminal.wait_text("2 processes at http://127.0.0.1:", START_TIMEOUT_S)
        terminal.type(CTRL_C)
        check_stopped(terminal)
        assert "127.0.0.1:0" not in terminal.text
    finally:
        terminal.close()


def test_ctrl_c_before_anything_has_begun(tmp_path: Path) -> None:
    """Pressed while the command itself is still being imported, it shows no traceback of imports."""
    (tmp_path / "typer.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    terminal = Terminal([sys.executable, "-m", "cli", "serve"], PYTHONPATH=f"{tmp_path}:{ROOT}")
    try:
        terminal.wait_text("importing", TIMEOUT_S)
        terminal.type(CTRL_C)
        assert terminal.process.wait(timeout=TIMEOUT_S) != 2
        assert lines_of(terminal) in (["importing"], ["importing", "^C"])
    finally:
        terminal.close()


def test_ctrl_c_while_the_model_loads(start: Start, chat_model: Path) -> None:
    """Changing one's mind early ends every process, with exit code 0 and without a traceback."""
    terminal = start(chat_model)
    terminal.wait_text("importing torch", START_TIMEOUT_S)
    terminal.type(CTRL_C)
    check_stopped(terminal)
    assert "Ready" not in terminal.text


def test_ctrl_c_when_idle(start: Start, chat_model: Path) -> None:
    """All that a start shows is a few lines of one form, the URL and a chat to paste; nothing of Gunicorn's own."""
    terminal = start(chat_model)
    terminal.wait_text("curl ", START_TIMEOUT_S)
    assert len(terminal.text.split("curl ")[0].splitlines()) <= 15
    terminal.type(CTRL_C)
    check_stopped(terminal)
    assert "gunicorn" not in terminal.text.lower()
    assert "/v1/chat/completions" in terminal.text


def test_ctrl_c_in_the_middle_of_streams(start: Start, chat_model: Path) -> None:
    """Each stream gets an end, and nothing waits for its tokens."""
    terminal = start(chat_model)
    terminal.wait_text("curl ", START_TIMEOUT_S)
    streams = [stream(terminal) for _ in range(3)]
    for _, response in streams:
        assert response.status == 200
        assert response.readline().startswith(b"data: ")
    terminal.type(CTRL_C)
    for connection, response in streams:
        assert response.read().rstrip().endswith(b"data: [DONE]")
        connection.close()
    check_stopped(terminal)


def test_a_base_model_is_offered_what_it_can_do(start: Start, base_model: Path) -> None:
    """Without a chat template the line to paste is a text completion; all of the log is there at debug, too."""
    terminal = start(base_model, "--log-level", "debug")
    terminal.wait_text("curl ", START_TIMEOUT_S)
    connection, response = stream(terminal)
    assert response.readline().startswith(b"data: ")
    connection.close()
    terminal.type(CTRL_C)
    assert terminal.process.wait(timeout=TIMEOUT_S) == 0
    (curl,) = [line for line in lines_of(terminal) if line.startswith("curl ")]
    assert "/v1/completions -H" in curl
    assert '"prompt"' in curl
    assert " gunicorn: " in terminal.text
