"""Measure this server and `transformers serve --continuous-batching` with one model, one load, one run.

    python tests/load/compare_peers.py [MODEL] [--concurrency 16 --concurrency 1] [--repeats 3] [--json FILE]

Both servers load the same folder and get the same prompts, exact in tokens, each answered with exactly as many tokens
as asked; they run one after the other, never together, in alternating order, so that a machine that drifts favours
neither. Prints a row a server and concurrency, and the ratio with its spread. The peer lives in a virtual environment
of its own, outside the checkout, with the same versions of torch and transformers; it is made on the first run.
"""

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cli.bench.client import Target
from cli.bench.command import Load, resolve_model_name, run_load
from cli.bench.prompts import TokenPrompts
from cli.bench.stats import summarize
from cli.bench.stream import StreamRules
from common.config import WorkerConfig, default_cache_dir, load
from worker.models.resolve import resolve_model

ROOT = Path(__file__).parents[2]
OURS = "tokenloom"
START_LIMIT_S = 600.0
STOP_LIMIT_S = 60.0


@dataclass(frozen=True)
class Server:
    """One server under test: how it is started, when it is ready, and how it is asked."""

    name: str
    command: list[str]
    ready_path: str
    target: Target


@dataclass(frozen=True)
class Measurement:
    """The figures of one server at one concurrency in one repeat."""

    server: str
    concurrency: int
    repeat: int
    figures: dict[str, Any]


def tokenloom_server(folder: Path, port: int, max_tokens: int, extra: list[str]) -> Server:
    """This project's server, started as its users start it."""
    command = [sys.executable, "-m", "cli", "serve", "--model", str(folder), "--port", str(port), *extra]
    target = Target(url=f"http://127.0.0.1:{port}", model="", endpoint="completions", max_tokens=max_tokens)
    return Server(OURS, command, "/ready", target)


def transformers_server(python: Path, folder: Path, port: int, max_tokens: int, dtype: str, extra: list[str]) -> Server:
    """`transformers serve --continuous-batching`, told to generate exactly `max_tokens` tokens.

    It refuses `ignore_eos` and ends streams without [DONE], but sends usage by itself. A request may carry a
    generation config, which can switch the end-of-sequence token off; greedy, as temperature 0 is for the other side.
    """
    command = [str(python.with_name("transformers")), "serve", str(folder), "--continuous-batching"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, *extra]
    config = json.dumps({"max_new_tokens": max_tokens, "do_sample": False, "eos_token_id": -1})
    target = Target(
        url=f"http://127.0.0.1:{port}",
        model=str(folder),
        endpoint="completions",
        max_tokens=max_tokens,
        ignore_eos=False,
        ask_usage=False,
        rules=StreamRules(expect_done=False),
        extra_body={"generation_config": config},
    )
    return Server(f"transformers serve, {dtype}", command, "/health", target)


def peer_python(folder: Path) -> Path:
    """Python of the peer's environment, with the versions of torch and transformers that run here; made if missing."""
    python = folder / "bin" / "python"
    wanted = {"torch": version("torch"), "transformers": version("transformers")}
    if python.exists() and _installed(python, list(wanted)) == wanted:
        return python
    print(f"Making the peer's environment in {folder}", flush=True)
    venv.create(folder, with_pip=True)
    torch_spec = f"torch=={wanted['torch'].partition('+')[0]}"
    subprocess.run([python, ROOT / "deploy" / "install_torch.py", torch_spec], check=True)
    spec = f"transformers[serving]=={wanted['transformers']}"
    subprocess.run([python, "-m", "pip", "install", "-qq", spec], check=True)
    found = _installed(python, list(wanted))
    if found != wanted:
        print(f"NOTE versions differ: the peer has {found}, this side {wanted}", flush=True)
    return python


def _installed(python: Path, names: list[str]) -> dict[str, str]:
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    shown = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return json.loads(shown.stdout) if shown.returncode == 0 else {}


@contextmanager
def running(server: Server, log: Path) -> Iterator[None]:
    """Start a server in its own process group, wait until it is ready, and end all of it afterwards.

    Raises RuntimeError naming the log when it dies or is not ready in time.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            server.command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        _wait_ready(server, process, log)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < give_up_s:
        if process.poll() is not None:
            raise RuntimeError(f"{server.name} ended with {process.returncode} at its start; see {log}")
        try:
            with urllib.request.urlopen(server.target.url + server.ready_path, timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"{server.name} was not ready after {START_LIMIT_S:g} s; see {log}")


def measure(server: Server, folder: Path, concurrency: int, repeat: int, options: argparse.Namespace) -> Measurement:
    """One closed-loop run against a running server. Prompts depend on repeat and concurrency, not on the server."""
    seed = 1000 * repeat + concurrency
    prompts = TokenPrompts(folder, options.prompt_tokens, seed=seed, special_tokens=True)
    amount = Load(concurrency, requests=max(options.waves * concurrency, 3), warmup=concurrency)
    target = asyncio.run(resolve_model_name(server.target))
    records = asyncio.run(run_load(target, prompts, amount))
    return Measurement(server.name, concurrency, repeat, summarize(records, options.max_tokens))


def alternate(servers: Sequence[Server], repeats: int) -> Iterator[tuple[int, Server]]:
    """The order of runs: forwards, then backwards, and so on, so that each server is as often early as late."""
    for repeat in range(repeats):
        for server in servers if repeat % 2 == 0 else reversed(servers):
            yield repeat, server


def rate(measurement: Measurement) -> float:
    """Output tokens per second of one measurement."""
    return float(measurement.figures["output_tokens_per_s"])


def ratios(measurements: Sequence[Measurement], peer: str, concurrency: int) -> list[float]:
    """Output tokens/s of this server over the peer's, one ratio a repeat; repeats with a rate of 0 are left out."""
    rates = {(m.server, m.repeat): rate(m) for m in measurements if m.concurrency == concurrency}
    repeats = sorted({repeat for _, repeat in rates})
    pairs = [(rates.get((OURS, repeat), 0.0), rates.get((peer, repeat), 0.0)) for repeat in repeats]
    return [ours / theirs for ours, theirs in pairs if ours and theirs]


def spread(values: Sequence[float], unit: str = "") -> str:
    """Median and range as text."""
    if not values:
        return "–"
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f}–{max(values):.2f})"


def median_ms(times_s: Sequence[float]) -> str:
    """Median in milliseconds as text."""
    return f"{statistics.median(times_s) * 1000:.0f}" if times_s else "–"


def results_table(measurements: Sequence[Measurement]) -> Table:
    """A row a server and concurrency: medians over the repeats, with the range in parentheses."""
    table = Table(title="Medians over repeats (range); TTFT and TPOT are p50")
    for column in ("server", "c", "output tok/s", "TTFT ms", "TPOT ms", "failed", "short", "tokenloom is"):
        table.add_column(column, justify="left" if column == "server" else "right", no_wrap=True)
    in_order = dict.fromkeys((m.concurrency, m.server) for m in measurements)
    for concurrency, name in sorted(in_order, key=lambda row: -row[0]):
        group = [m for m in measurements if (m.concurrency, m.server) == (concurrency, name)]
        figures = [m.figures for m in group]
        times = [median_ms([f[key]["p50"] for f in figures if f[key]]) for key in ("ttft_s", "tpot_s")]
        counts = [str(sum(f[key] for f in figures)) for key in ("failed", "short_outputs")]
        ratio = "" if name == OURS else spread(ratios(measurements, name, concurrency), " ×")
        table.add_row(name, str(concurrency), spread([rate(m) for m in group]), *times, *counts, ratio)
    return table


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    cache = Path(default_cache_dir())
    parser = argparse.ArgumentParser(description="Compare this server with transformers serve.")
    parser.add_argument("model", nargs="?", help="catalogue name, folder, .gguf file or hub id")
    parser.add_argument("-c", "--concurrency", type=int, action="append", help="in flight (default: 16, then 1)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--waves", type=int, default=2, help="requests a run, as a multiple of the concurrency")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--peer-dtype", action="append", help="dtype of the peer; several give several rows")
    parser.add_argument("--peer-venv", type=Path, default=cache / "peer-venv", help="made when missing")
    parser.add_argument("--peer-args", default="", help="more flags for transformers serve")
    parser.add_argument("--our-args", default="", help="more flags for tokenloom serve")
    parser.add_argument("--log-dir", type=Path, default=cache / "bench-logs")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args(arguments)
    options.concurrency = options.concurrency or [16, 1]
    options.peer_dtype = options.peer_dtype or ["auto"]
    return options


def build_servers(folder: Path, options: argparse.Namespace) -> list[Server]:
    """This server first, then the peer once a dtype; each on its own port."""
    python = peer_python(options.peer_venv)
    ours = tokenloom_server(folder, free_port(), options.max_tokens, shlex.split(options.our_args))
    peers = [
        transformers_server(python, folder, free_port(), options.max_tokens, dtype, shlex.split(options.peer_args))
        for dtype in options.peer_dtype
    ]
    return [ours, *peers]


def compare(
    servers: Sequence[Server], folder: Path, options: argparse.Namespace, console: Console
) -> list[Measurement]:
    """Run every server in turn under every concurrency, saying each figure as it comes."""
    options.log_dir.mkdir(parents=True, exist_ok=True)
    measurements: list[Measurement] = []
    for repeat, server in alternate(servers, options.repeats):
        log = options.log_dir / (re.sub(r"\W+", "-", server.name) + ".log")
        with running(server, log):
            for concurrency in options.concurrency:
                done = measure(server, folder, concurrency, repeat, options)
                measurements.append(done)
                console.print(f"repeat {repeat + 1}, {server.name}, c = {concurrency}: {rate(done):.2f} output tok/s")
                for kind, detail in done.figures["error_samples"].items():
                    console.print(f"  FAILED {done.figures['errors'][kind]} × {kind}: {detail}", markup=False)
    return measurements


def main() -> int:
    """Measure, print, and return 1 when a request failed or came out short: such rows do not compare."""
    options = parse_options()
    # A narrower table would lose its figures where the output goes to a file.
    console = Console(width=max(132, Console().width))
    folder = resolve_model(load(WorkerConfig, {"model": options.model}), lambda progress: None).path
    measurements = compare(build_servers(folder, options), folder, options, console)
    console.print(results_table(measurements))
    if options.json:
        options.json.write_text(json.dumps([asdict(m) for m in measurements], indent=2) + "\n", encoding="utf-8")
    return int(any(m.figures["failed"] or m.figures["short_outputs"] for m in measurements))


if __name__ == "__main__":
    sys.exit(main())
