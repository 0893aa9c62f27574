"""`tokenloom bench` end to end against a scripted server: what is counted, what is a failure. No wall time asserted."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli.bench import bench
from tests.support.scripted_server import ScriptedServer

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


def run_bench(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON figures ({} when none), and all that was printed."""
    app = typer.Typer()
    app.command()(bench)
    result = CliRunner().invoke(app, [*arguments, "--json", "-"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, json.loads(result.stdout) if result.stdout.strip() else {}, result.output


def test_closed_loop_counts_every_token(server: ScriptedServer) -> None:
    """Requests, tokens and gaps add up, each request has its own prompt, and never more than c are in flight."""
    code, figures, _ = run_bench(
        "--url", server.url, "-c", "3", "-n", "12", "--warmup", "2", "--max-tokens", "5", "--prompt-tokens", "20"
    )
    assert code == 0
    assert (figures["requests"], figures["succeeded"], figures["failed"]) == (12, 12, 0)
    assert (figures["output_tokens"], figures["prompt_tokens"]) == (60, 240)
    assert figures["tokens_per_chunk"] == 1.0
    assert (figures["ttft_s"]["count"], figures["itl_s"]["count"], figures["e2e_s"]["count"]) == (12, 48, 12)
    assert figures["config"]["model"] == "good"
    assert figures["finish_reasons"] == {"length": 12}
    assert server.peak_in_flight == 3
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 14
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in server.bodies)


def test_latencies_keep_their_order(server: ScriptedServer) -> None:
    """TTFT is before the end, the percentiles grow, and the role delta, sent at once, is not the first token."""
    _, figures, _ = run_bench("--url", server.url, "-c", "1", "-n", "3", "--max-tokens", "5")
    for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s"):
        stats = figures[name]
        assert 0 < stats["p50"] <= stats["p90"] <= stats["p95"] <= stats["p99"] <= stats["max"]
    assert figures["ttft_s"]["min"] > 0.0015, "the script waits 2 ms before the first text, none before the role"
    assert figures["ttft_s"]["max"] < figures["e2e_s"]["max"]
    assert figures["duration_s"] >= figures["e2e_s"]["max"]


def test_open_loop_sends_all_whatever_the_server_does(server: ScriptedServer) -> None:
    code, figures, _ = run_bench("--url", server.url, "--rate", "200", "-n", "30", "--max-tokens", "4")
    assert code == 0
    assert (figures["succeeded"], figures["output_tokens"]) == (30, 120)
    assert figures["config"]["loop"] == "open"
    assert figures["send_lag_s"]["min"] >= 0


def test_bytes_cut_anywhere_count_the_same(server: ScriptedServer) -> None:
    """Lines split over reads and CRLF line ends lose no token."""
    code, figures, _ = run_bench("--url", server.url, "--model", "ragged", "-c", "2", "-n", "4", "--max-tokens", "9")
    assert code == 0
    assert figures["output_tokens"] == 36
    assert figures["tokens_per_chunk"] == 1.0


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("no_done", "no_done"),
        ("error_event", "error_event"),
        ("reset", "broken"),
        ("busy", "http_429"),
        ("no_usage", "no_usage"),
        ("hang", "timeout"),
    ],
)
def test_a_failure_is_never_a_success(server: ScriptedServer, model: str, kind: str) -> None:
    """Every way to break a stream is counted under its kind, adds no output, and makes the exit code 1."""
    timeout = "0.3" if model == "hang" else "30"
    code, figures, output = run_bench(
        "--url", server.url, "--model", model, "-c", "2", "-n", "4", "--max-tokens", "3", "--timeout", timeout
    )
    assert code == 1
    assert figures["errors"] == {kind: 4}
    assert (figures["succeeded"], figures["output_tokens"], figures["output_tokens_per_s"]) == (0, 0, 0)
    assert f"FAILED 4 × {kind}" in output


def test_nobody_listening_is_a_failure() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        code, figures, _ = run_bench("--url", url, "--model", "good", "-n", "2")
        assert (code, figures["errors"]) == (1, {"connect": 2})
        code, figures, output = run_bench("--url", url, "-n", "2")
        assert (code, figures) == (2, {})
        assert "/v1/models" in output


def test_flags_for_servers_that_know_less(server: ScriptedServer) -> None:
    """No [DONE], no usage, no ignore_eos: each can be allowed, and is then neither sent nor asked for."""
    common = ("--url", server.url, "-c", "1", "-n", "2", "--max-tokens", "3")
    assert run_bench(*common, "--model", "no_done", "--no-expect-done")[1]["output_tokens"] == 6
    assert run_bench(*common, "--model", "no_usage", "--count", "chunks")[1]["output_tokens"] == 6
    server.bodies.clear()
    code, _, _ = run_bench(
        *common, "--endpoint", "completions", "--no-ignore-eos", "--no-ask-usage", "--extra-body", '{"top_k": 7}'
    )
    assert code == 0
    for body in server.bodies:
        assert body["top_k"] == 7
        assert isinstance(body["prompt"], str)
        assert not {"ignore_eos", "stream_options", "messages"} & set(body)


def test_outputs_shorter_than_asked_are_told(server: ScriptedServer) -> None:
    code, figures, output = run_bench("--url", server.url, "--model", "short", "-n", "2", "--max-tokens", "5")
    assert (code, figures["short_outputs"]) == (0, 2)
    assert "shorter than asked" in output


def test_json_goes_to_a_file_and_never_holds_the_key(server: ScriptedServer, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(bench)
    out = tmp_path / "figures.json"
    arguments = ["--url", server.url + "/v1", "-n", "2", "--max-tokens", "2", "--api-key", "sk-hidden"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(out)])
    assert result.exit_code == 0
    assert "TTFT" in result.output
    assert json.loads(out.read_text())["succeeded"] == 2
    assert "sk-hidden" not in out.read_text() + result.output


def test_bad_options_stop_before_any_request(server: ScriptedServer) -> None:
    assert run_bench("--url", server.url, "--extra-body", "[]")[0] == 2
    assert run_bench("--url", server.url, "--prompt-tokens", "8", "--shared-prefix", "8")[0] == 2
    assert server.bodies == []


def test_a_duration_ends_the_run(server: ScriptedServer) -> None:
    """No number of requests is needed; those in flight at the end are finished and counted."""
    code, figures, _ = run_bench("--url", server.url, "-c", "2", "--duration", "0.2", "--max-tokens", "4")
    assert code == 0
    assert figures["requests"] == len(server.bodies) > 0
    assert figures["output_tokens"] == 4 * figures["requests"]


def test_prompts_share_the_prefix_asked_and_nothing_else(server: ScriptedServer) -> None:
    run_bench("--url", server.url, "-n", "6", "--prompt-tokens", "30", "--shared-prefix", "10", "--max-tokens", "2")
    words = [body["messages"][0]["content"].split() for body in server.bodies]
    assert {len(w) for w in words} == {30}
    assert len({tuple(w[:10]) for w in words}) == 1
    assert len({tuple(w[10:14]) for w in words}) == 6


def test_without_its_extra_the_command_says_what_to_install() -> None:
    """The other commands import this one; a missing aiohttp must cost only `bench`."""
    code = "import sys; sys.modules['aiohttp'] = None; sys.argv = ['tokenloom', 'bench']; "
    code += "from cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "make install-dev" in done.stdout
    assert "Traceback" not in done.stderr
