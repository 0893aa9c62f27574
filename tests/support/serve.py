"""A `tokenloom serve` process for tests: its output, its children, and requests to it."""

import http.client
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.processes import ROOT, wait_for

START_TIMEOUT_S = 120.0
TIMEOUT_S = 60.0
MODEL = "qwen2.5-coder-0.5b-instruct"


class Serve:
    """A `tokenloom serve` with its output in files."""

    def __init__(self, directory: Path, *arguments: str):
        self._out, self._err = directory / "out", directory / "err"
        env = {name: value for name, value in os.environ.items() if not name.startswith("TOKENLOOM_")}
        with open(self._out, "w") as out, open(self._err, "w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cli", "serve", *arguments],
                cwd=ROOT,
                env={**env, "PYTHONPATH": str(ROOT)},
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._out.read_text()

    @property
    def errors(self) -> str:
        return self._err.read_text()

    def curl_line(self) -> str:
        """Return the printed line to try the server with."""
        found = re.search(r"^curl .*$", self.output, re.MULTILINE)
        return found.group() if found else ""

    def wait_ready(self) -> "Serve":
        def ready_or_dead() -> bool:
            return bool(self.curl_line()) or self.process.poll() is not None

        wait_for(ready_or_dead, START_TIMEOUT_S, "the ready line")
        assert self.process.poll() is None, self.errors
        return self

    @property
    def port(self) -> int:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", self.curl_line())
        assert found is not None
        return int(found.group(1))

    def child(self, name: str) -> psutil.Process:
        """Return the process of the worker or of Gunicorn's master."""
        marks = {"worker": "worker", "web": "gunicorn"}
        for child in psutil.Process(self.process.pid).children():
            if marks[name] in child.cmdline():
                return child
        raise AssertionError(f"no {name} process")

    def stream(
        self, max_tokens: int, port: int | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Start a stream that goes on until max_tokens, straight or through a proxy's port."""
        body = {"model": MODEL, "prompt": "One,", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=TIMEOUT_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def status(self, path: str, port: int | None = None) -> int:
        """Return the status of a GET, 0 when nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()
