"""`tokenloom serve`: one worker and the web tier on one machine, over private sockets.

The listening socket is opened here and handed to Gunicorn: a busy port is an error before anything starts, port 0 has
its number at once, and connections wait instead of being refused while a dead web tier starts again.
"""

import dataclasses
import errno
import http.client
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from cli.child import Child
from cli.supervisor import Supervisor
from common.config import WebConfig, WorkerConfig, local_endpoint, to_env
from common.errors import ConfigError
from common.logs import set_up_logging
from worker.models.resolve import find_source

log = logging.getLogger(__name__)

BACKLOG = 2048
PROBE_TIMEOUT_S = 0.5
WORKER_STOP_TIMEOUT_S = 10.0
WEB_STOP_MARGIN_S = 10.0
"""What Gunicorn gets on top of the time it gives its requests."""


def serve(worker: WorkerConfig, web: WebConfig) -> int:
    """Run worker and web until SIGINT or SIGTERM; return the exit code.

    Raises ConfigError and ModelError before anything starts.
    """
    set_up_logging(worker.log_level)
    find_source(worker)
    with _listen(web.host, web.port) as listener, _private_directory() as directory:
        submit, publish = f"ipc://{directory}/submit.sock", f"ipc://{directory}/publish.sock"
        worker = dataclasses.replace(worker, submit_endpoint=submit, publish_endpoint=publish)
        web = dataclasses.replace(web, submit_endpoint=submit, publish_endpoint=publish)
        server = Server(listener, web.host)
        children = _children(worker, dataclasses.replace(web, port=server.port), listener)
        log.info("starting %s at %s", worker.model, server.url)
        return Supervisor(children, server, settle_s=web.heartbeat_timeout_s).run()


def _children(worker: WorkerConfig, web: WebConfig, listener: socket.socket) -> list[Child]:
    """Return the processes, the one that stops first at the front, so that streams end before their worker does."""
    env = {**os.environ, **to_env(worker), **to_env(web)}
    program = [sys.executable, "-m", "cli"]
    return [
        Child(
            "web",
            [*program, "web", "--listen-fd", str(listener.fileno())],
            env,
            stop_timeout_s=web.graceful_timeout_s + WEB_STOP_MARGIN_S,
            orphan_signal=signal.SIGTERM,  # Gunicorn's own processes end with it; SIGKILL would orphan them
            pass_fds=(listener.fileno(),),
        ),
        Child("worker", [*program, "worker"], env, stop_timeout_s=WORKER_STOP_TIMEOUT_S),
    ]


class Server:
    """What the supervisor asks of the running server, as any client would: whether it is ready, and its models."""

    def __init__(self, listener: socket.socket, host: str):
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
        self._announced = False

    @property
    def url(self) -> str:
        """The address a client on this machine uses."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    def ready(self) -> bool:
        """Return whether /ready answers 200, within PROBE_TIMEOUT_S."""
        status, _ = self._get("/ready")
        return status == 200

    def announce(self) -> None:
        """Print the URL and a line to try it with; the second time only that it is ready again."""
        console = Console()
        if self._announced:
            console.print(f"[green]Ready again[/green] at {self.url}", highlight=False)
            return
        self._announced = True
        console.print(f"\n[bold green]Ready[/bold green] at {self.url}/v1 — stop with Ctrl-C. Try:\n", highlight=False)
        # print, not rich: the line must stay one line to be pasted
        print(self._curl_line(self._model()) + "\n", flush=True)

    def close(self) -> None:
        """Close the listening socket here, so that nobody waits in its queue once Gunicorn has closed its own copy."""
        self._listener.close()

    def _curl_line(self, model: dict[str, Any]) -> str:
        """Return a command that streams an answer: of a chat, or of a text where the model has no chat template."""
        question: dict[str, Any]
        if model["chat_template"]:
            path, question = "chat/completions", {"messages": [{"role": "user", "content": "Hello! Who are you?"}]}
        else:
            path, question = "completions", {"prompt": "Once upon a time"}
        body = {"model": model["id"], **question, "max_tokens": 128, "stream": True}
        data = shlex.quote(json.dumps(body, ensure_ascii=False))
        return f"curl -N {self.url}/v1/{path} -H 'Content-Type: application/json' -d {data}"

    def _model(self) -> dict[str, Any]:
        """Return what the server says of its model; in the rare case that it does not answer now, what always works."""
        status, body = self._get("/v1/models")
        model: dict[str, Any] = json.loads(body)["data"][0] if status == 200 else {"id": "", "chat_template": False}
        return model

    def _get(self, path: str) -> tuple[int, bytes]:
        """GET a path; status 0 when the server does not answer."""
        connection = http.client.HTTPConnection(self._host, self.port, timeout=PROBE_TIMEOUT_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()


@contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """Open the listening socket. Raises ConfigError naming the port or the host."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError("host", f"{host}: {error.strerror or error}") from None
    try:
        listener = socket.create_server((str(address[0]), port), family=family, backlog=BACKLOG)
    except PermissionError:
        raise ConfigError("port", f"{port} on {host} needs more rights than this user has") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError("port", _port_in_use(host, port)) from None
        raise ConfigError("host", f"{host}: {error.strerror or error}") from None
    with listener:
        yield listener


def _port_in_use(host: str, port: int) -> str:
    other = 9000 if port != 9000 else 9001
    return f"{port} on {host} is already in use; choose another, as in --port {other} or PORT={other} make serve"


@contextmanager
def _private_directory() -> Iterator[Path]:
    """Make a folder for the sockets that only this user can enter, short enough for a socket's path; then remove it."""
    bases: list[Any] = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]
    for base in filter(None, bases):
        if not os.access(base, os.W_OK) or local_endpoint(f"ipc://{base}/tokenloom-12345678/publish.sock"):
            continue
        directory = Path(tempfile.mkdtemp(prefix="tokenloom-", dir=base))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return
    raise ConfigError("submit_endpoint", "no writable folder with a path short enough for sockets; set XDG_RUNTIME_DIR")
