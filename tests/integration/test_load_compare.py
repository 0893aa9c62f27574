"""The comparison's own machinery, with two scripted servers in the place of the real ones."""

import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cli.bench.client import Target
from tests.load.compare_peers import Server, compare, free_port, parse_options, running
from tests.unit.test_bench_prompts import build_tokenizer

pytestmark = pytest.mark.timeout(120)


def scripted(name: str, model: str) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "tests.support.scripted_server", model, str(port)]
    target = Target(url=f"http://127.0.0.1:{port}", model="", endpoint="completions", max_tokens=4)
    return Server(name, command, "/ready", target)


def test_servers_are_started_measured_and_ended_in_turn(tmp_path: Path) -> None:
    """Every server under every load in every repeat, never two at once, none left, failures kept apart."""
    folder = build_tokenizer(tmp_path, 300)
    options = parse_options(["-c", "3", "-c", "1", "--repeats", "2", "--max-tokens", "4", "--prompt-tokens", "32"])
    options.log_dir = tmp_path / "logs"
    servers = [scripted("good one", "good"), scripted("bad one", "no_done")]
    runs = compare(servers, folder, options, Console(quiet=True))
    assert [(r.server, r.repeat, r.concurrency) for r in runs] == [
        (name, repeat, concurrency)
        for repeat, names in enumerate([("good one", "bad one"), ("bad one", "good one")])
        for name in names
        for concurrency in (3, 1)
    ]
    for run in runs:
        wanted = max(2 * run.concurrency, 3)
        good = run.server == "good one"
        assert run.figures["requests"] == wanted
        assert run.figures["errors"] == ({} if good else {"no_done": wanted})
        assert run.figures["output_tokens"] == (4 * wanted if good else 0)


def test_a_server_that_dies_is_named_with_its_log(tmp_path: Path) -> None:
    """No endless wait for a server that cannot start."""
    dead = Server("dead one", [sys.executable, "-c", "raise SystemExit(3)"], "/ready", scripted("x", "good").target)
    log = tmp_path / "dead.log"
    with pytest.raises(RuntimeError, match=r"dead one ended with 3.*dead\.log"):
        with running(dead, log):
            pass


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    """Also when the measurement fails."""
    pid_file = tmp_path / "pid"
    server = scripted("good one", "good")
    code = f"import os, runpy; open({str(pid_file)!r}, 'w').write(str(os.getpid())); runpy.run_module("
    code += "'tests.support.scripted_server', run_name='__main__')"
    wrapped = Server(server.name, [sys.executable, "-c", code, *server.command[3:]], "/ready", server.target)
    with pytest.raises(ZeroDivisionError):
        with running(wrapped, tmp_path / "log"):
            raise ZeroDivisionError
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
