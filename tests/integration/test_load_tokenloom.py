"""`tokenloom bench` and locust against this server: real Gunicorn, real ZeroMQ, real worker process, a fake runner."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import typer
from tokenizers import Tokenizer
from typer.testing import CliRunner

from cli.bench import bench
from cli.web_process import gunicorn_command
from common.config import WebConfig, load, to_env
from tests.integration.test_load_locust import run_locust
from tests.support import tiny_tokenizer
from tests.support.fake_worker import start_fake_worker
from tests.support.processes import ROOT, free_port, wait_for
from tests.unit.test_bench_prompts import build_tokenizer

pytestmark = pytest.mark.timeout(120)


class Stack(NamedTuple):
    """A running server: its address, and the folder with its tokenizer."""

    url: str
    model: Path


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A web tier whose worker has no model but does everything else."""
    folder = tmp_path_factory.mktemp("stack")
    # The chat template of the one, the tokenizer with words of one token of the other.
    model = build_tokenizer(tiny_tokenizer.write(folder / "model"), 300)
    endpoints = [f"ipc://{folder}/{name}" for name in ("submit", "publish")]
    port = free_port()
    # One process: /ready answers for the process that is asked, and another may not have heard of the worker yet.
    settings = {"submit_endpoint": endpoints[0], "publish_endpoint": endpoints[1], "port": port, "web_workers": 1}
    config = load(WebConfig, settings)
    environment = os.environ | to_env(config) | {"PYTHONPATH": str(ROOT)}
    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    worker = start_fake_worker(*endpoints, step_delay_s=0.002, vocab_size=vocabulary, model_path=model)
    with open(folder / "web.log", "w") as log:
        web = subprocess.Popen(gunicorn_command(), cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(lambda: is_ready(address), 60, "readiness")
        yield Stack(address, model)
    finally:
        for process in (web, worker):
            process.terminate()
            process.wait(30)


def is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def run_bench(out: Path, *arguments: str) -> dict:
    app = typer.Typer()
    app.command()(bench)
    result = CliRunner().invoke(app, [*arguments, "--json", str(out)])
    assert result.exit_code == 0, result.output
    return json.loads(out.read_text())


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("loop", [("-c", "16"), ("--rate", "100")], ids=["closed", "open"])
def test_every_token_of_both_loops_arrives(stack: Stack, tmp_path: Path, endpoint: str, loop: tuple[str, ...]) -> None:
    """All requests whole: [DONE], a finish reason of length, and exactly the tokens asked, by the server's usage."""
    figures = run_bench(
        tmp_path / "out", "--url", stack.url, "-n", "32", *loop, "--max-tokens", "20", "--endpoint", endpoint
    )
    assert (figures["succeeded"], figures["errors"]) == (32, {})
    assert (figures["output_tokens"], figures["short_outputs"]) == (640, 0)
    assert figures["finish_reasons"] == {"length": 32}
    assert figures["tokens_per_chunk"] >= 1


def test_prompts_are_as_long_as_the_server_counts_them(stack: Stack, tmp_path: Path) -> None:
    """What --tokenizer promises is what the server's usage says, BOS included."""
    arguments = ["--url", stack.url, "--endpoint", "completions", "--tokenizer", str(stack.model)]
    figures = run_bench(tmp_path / "out", *arguments, "-n", "8", "--prompt-tokens", "37", "--max-tokens", "2")
    assert figures["prompt_tokens"] == 8 * 37
    assert figures["config"]["prompt_unit"] == "tokens"


def test_locust_against_this_server(stack: Stack, tmp_path: Path) -> None:
    code, totals, stats = run_locust(stack.url, "fake", tmp_path)
    assert (code, totals["failures"]) == (0, 0)
    assert totals["output_tokens"] == 6 * totals["requests"] > 0
    assert stats["TTFT"]["num_requests"] == totals["requests"]


def test_an_unknown_model_is_a_failure_with_its_status(stack: Stack) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cli", "bench", "--url", stack.url, "--model", "nobody", "-n", "2", "--json", "-"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["errors"] == {"http_404": 2}
