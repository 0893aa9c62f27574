"""The locust file, run as a person runs it, for a few seconds against a scripted server."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted_server import ScriptedServer

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(120)


def run_locust(url: str, model: str, tmp_path: Path) -> tuple[int, dict[str, Any], dict[str, dict[str, Any]]]:
    """Exit code, the totals it printed, and its statistics by name."""
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "tests/load/locustfile.py"), "--headless"]
    command += ["-u", "4", "-r", "4", "-t", "3s", "--host", url, "--model", model, "--max-tokens", "6"]
    command += ["--json-file", str(tmp_path / "run"), "--only-summary"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    totals = re.search(r"^TOTALS (.*)$", done.stdout, re.MULTILINE)
    assert totals, done.stdout + done.stderr
    stats = json.loads((tmp_path / "run.json").read_text())
    return done.returncode, json.loads(totals[1]), {entry["name"]: entry for entry in stats}


def test_a_good_server_gives_tokens_and_the_custom_metrics(tmp_path: Path) -> None:
    """Each success reports one TTFT, n − 1 gaps and its tokens from usage; the totals add up; no failure."""
    with ScriptedServer() as server:
        code, totals, stats = run_locust(server.url, "good", tmp_path)
    assert (code, totals["failures"]) == (0, 0)
    assert totals["requests"] > 4, "every user asked more than once"
    assert totals["output_tokens"] == 6 * totals["requests"]
    assert totals["output_tokens_per_s"] > 0
    requests = totals["requests"]
    assert stats["/v1/chat/completions"]["num_requests"] == requests
    assert stats["TTFT"]["num_requests"] == stats["tokens"]["num_requests"] == requests
    assert stats["ITL"]["num_requests"] == 5 * requests
    # The script pauses 2 ms before each token: a client that reads in blocks would see gaps of nothing.
    assert stats["ITL"]["total_response_time"] / (5 * requests) > 1


@pytest.mark.parametrize("model", ["no_done", "reset", "error_event", "busy"])
def test_broken_streams_are_failures(tmp_path: Path, model: str) -> None:
    """A missing [DONE], a torn connection, an error event, a refusal: none is a success, and locust exits with 1."""
    with ScriptedServer() as server:
        code, totals, _ = run_locust(server.url, model, tmp_path)
    assert code == 1
    assert totals["failures"] == totals["requests"] > 0
    assert totals["output_tokens"] == 0
