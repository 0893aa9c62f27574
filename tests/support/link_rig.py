"""A worker process, a Gunicorn and clients, for tests of the link: started on free ports, ended whatever happens."""

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from common.config import WebConfig
from common.ids import new_topic
from common.wire import Heartbeat, decode_to_web
from tests.support.fake_runner import expected_tokens
from tests.support.processes import ROOT, end_family, free_port, wait_for
from web.link.socket import WorkerSocket

WAIT_S = 20.0
VOCAB_SIZE = 1000


class Observer:
    """Hears the worker's heartbeats on a topic of its own."""

    def __init__(self, config: WebConfig):
        self._socket = WorkerSocket(config, new_topic())

    def heartbeat(self) -> Heartbeat:
        """The next heartbeat, one that is not older than this call."""
        self._socket.receive(1_000_000)

        def heard() -> Heartbeat | None:
            self._socket.wait(0.1)
            for data in reversed(self._socket.receive(1000)):
                message = decode_to_web(data)
                if isinstance(message, Heartbeat):
                    return message
            return None

        return wait_for(heard, WAIT_S, "a heartbeat")

    def wait_until(self, **wanted: int) -> None:
        """Wait until heartbeats show these values."""
        wait_for(
            lambda: (beat := self.heartbeat()) and all(getattr(beat, name) == value for name, value in wanted.items()),
            WAIT_S,
            f"a worker with {wanted}",
        )

    def wait_idle(self) -> None:
        """Wait until the worker holds nothing."""
        self.wait_until(running=0, waiting=0, kv_blocks_used=0)

    def close(self) -> None:
        self._socket.close()


@dataclass
class Stream:
    """One streamed answer, read to its end or as far as the test wants."""

    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse
    ids: list[list[int]] = field(default_factory=lambda: [[]])
    ends: list[str] = field(default_factory=list)
    done: bool = False

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield each event; notes ids, ends and whether [DONE] came."""
        while line := self.response.readline():
            if not line.startswith(b"data: "):
                continue
            assert not self.done, "something came after [DONE]"
            if line == b"data: [DONE]\n":
                self.done = True
                continue
            event = json.loads(line[6:])
            if "ids" in event:
                while len(self.ids) <= event["index"]:
                    self.ids.append([])
                mine = self.ids[event["index"]]
                assert event["pos"] == len(mine), "a token is missing or came twice"
                mine += event["ids"]
            else:
                self.ends.append(event.get("finish") or event["error"])
            yield event

    def read(self, count: int | None = None) -> "Stream":
        """Read `count` events, or all."""
        for number, _ in enumerate(self.events(), 1):
            if number == count:
                break
        return self

    def leave(self) -> None:
        """Hang up in the middle."""
        self.connection.sock.close() if self.connection.sock else None
        self.response.close()
        self.connection.close()


class Rig:
    """Everything a test needs, in one folder of sockets."""

    def __init__(self, folder: Path, worker_class: str, web: dict[str, Any], worker: dict[str, Any], app: str):
        self.folder = folder
        self._app = app
        self.port = free_port()
        self._worker = worker
        self.config = WebConfig(
            submit_endpoint=f"ipc://{folder}/submit.sock",
            publish_endpoint=f"ipc://{folder}/publish.sock",
            port=self.port,
            web_worker_class=worker_class,
            **{"web_workers": 1, "log_level": "warning", **web},
        )
        self._settings = ["web_worker_class", "port", "web_workers", "log_level", *web]
        self.observer = Observer(self.config)
        self._log = open(folder / "log", "ab")  # noqa: SIM115  closed in `close`
        self.worker: subprocess.Popen[str] | None = None
        self.web: subprocess.Popen[str] | None = None

    # --- processes ---

    def _environment(self) -> dict[str, str]:
        ours = {
            "PYTHONPATH": str(ROOT),
            "TOKENLOOM_SUBMIT_ENDPOINT": self.config.submit_endpoint,
            "TOKENLOOM_PUBLISH_ENDPOINT": self.config.publish_endpoint,
        }
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKENLOOM_")}
        return {**clean, **ours}

    def start_worker(self) -> None:
        """Start the worker process."""
        settings = {"max_batch_size": 256, "subscriber_grace_s": 0.5, "heartbeat_interval_s": 0.1, **self._worker}
        settings |= {name: getattr(self.config, name) for name in ("submit_endpoint", "publish_endpoint")}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        self.worker = self._start([sys.executable, "-m", "tests.support.fake_worker", *flags], self._environment())

    def start_web(self) -> None:
        """Start Gunicorn with the application."""
        settings = {f"TOKENLOOM_{name.upper()}": str(getattr(self.config, name)) for name in self._settings}
        command = [sys.executable, "-m", "gunicorn", "-c", "python:web.gunicorn_conf"]
        self.web = self._start([*command, self._app], {**self._environment(), **settings})

    def _start(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(command, env=env, cwd=ROOT, stdout=self._log, stderr=self._log, text=True)

    def kill_worker(self) -> None:
        """Kill -9 the worker."""
        assert self.worker is not None
        self.worker.kill()
        self.worker.wait(WAIT_S)

    @property
    def web_process(self) -> psutil.Process:
        """The one process of Gunicorn that serves."""
        assert self.web is not None
        (child,) = psutil.Process(self.web.pid).children()
        return child

    def wait_ready(self) -> None:
        """Wait until the web process would take a call."""
        wait_for(self.ready, WAIT_S, "a ready web process")

    def ready(self) -> bool:
        """Whether the web process answers that it is ready."""
        return self.get("/ready")[0] == 200

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def close(self) -> None:
        for process in (self.web, self.worker):
            if process is not None:
                end_family(process)
        self.observer.close()
        self._log.close()
        assert "Traceback" not in self.log(), self.log()[-3000:]

    # --- clients ---

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def state(self) -> dict[str, Any]:
        """What the web process says of itself; empty when it does not answer."""
        state: dict[str, Any] = json.loads(self.get("/state")[1])
        return state

    def get(self, path: str) -> tuple[int, bytes]:
        """GET a path: status and body; (0, {}) when nobody answers."""
        connection = self.connect()
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b"{}"
        finally:
            connection.close()

    def ask(self, prompt_ids: list[int], max_tokens: int, **more: Any) -> http.client.HTTPConnection:
        """Send a request and return its connection, without waiting for an answer."""
        return self.post("/generate", {"prompt_ids": prompt_ids, "max_tokens": max_tokens, **more})

    def post(self, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
        """Send a request with a JSON body and return its connection, without waiting for an answer."""
        connection = self.connect()
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def stream(self, prompt_ids: list[int], max_tokens: int, **more: Any) -> Stream:
        """Start a stream; it was accepted when this returns."""
        connection = self.ask(prompt_ids, max_tokens, **more)
        response = connection.getresponse()
        assert response.status == 200, (response.status, response.read())
        return Stream(connection, response)

    def signal_web(self, number: signal.Signals) -> None:
        """Send a signal to the process that serves."""
        os.kill(self.web_process.pid, number)


def check_whole(stream: Stream, prompt_ids: list[int], max_tokens: int, n: int = 1) -> None:
    """Assert that a stream holds exactly the tokens that the model gives for this prompt, and one proper end."""
    assert stream.ids == [expected_tokens(prompt_ids, max_tokens, VOCAB_SIZE)] * n
    assert stream.ends == ["length"] * n
    assert stream.done


MakeRig = Callable[..., Rig]


LINK_APP = "tests.support.link_app:create_app()"


def rig_maker(folder: Path, worker_class: str, app: str = LINK_APP) -> Iterator[MakeRig]:
    """Yield a function that starts a worker and a web process with given settings; end them all afterwards."""
    rigs: list[Rig] = []

    def make(web: dict[str, Any] | None = None, worker: dict[str, Any] | None = None) -> Rig:
        rig = Rig(folder, worker_class, web or {}, worker or {}, app)
        rigs.append(rig)
        rig.start_worker()
        rig.start_web()
        rig.wait_ready()
        return rig

    yield make
    for rig in rigs:
        rig.close()
