"""deploy/nginx.conf in front of a web tier that does exactly what a test tells it to.

The scripted tier makes the order of events certain: nginx must pass on what was sent while the rest does not exist.
"""

import http.client
import json
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.nginx import running_nginx
from tests.support.processes import free_port

TIMEOUT_S = 30.0
FLOOD_BYTES = 64 * 1024 * 1024


@dataclass
class Script:
    """What the tier streams (None ends it), and what it saw."""

    chunks: "queue.Queue[bytes | None]" = field(default_factory=queue.Queue)
    requests: "queue.Queue[tuple[str, dict[str, str], bytes]]" = field(default_factory=queue.Queue)
    taken: "queue.Queue[int]" = field(default_factory=queue.Queue)
    client_left: threading.Event = field(default_factory=threading.Event)
    connections: set[int] = field(default_factory=set)


class Handler(BaseHTTPRequestHandler):
    """Streams the script's chunks as SSE over HTTP/1.1; other paths answer with a status of their own."""

    protocol_version = "HTTP/1.1"
    script: Script

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.script.connections.add(self.client_address[1])
        self.script.requests.put((self.path, dict(self.headers), body))
        if self.path == "/refuse":
            self._answer(429, b'{"error": {"message": "full"}}')
        elif self.path == "/watch":
            self._watch()
        elif self.path == "/flood":
            self._flood()
        else:
            self._stream()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while (chunk := self.script.chunks.get(timeout=TIMEOUT_S)) is not None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        self.wfile.write(b"0\r\n\r\n")

    def _watch(self) -> None:
        """Answer nothing, as a queued request does, until the other side closes."""
        self.connection.settimeout(TIMEOUT_S)
        if self.connection.recv(1) == b"":
            self.script.client_left.set()
        self.close_connection = True

    def _flood(self) -> None:
        """Send as much as is taken, up to FLOOD_BYTES, and note how much that was."""
        sent, piece = 0, b"x" * 65536
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % FLOOD_BYTES)
        self.connection.settimeout(1.0)
        try:
            while sent < FLOOD_BYTES:
                sent += self.connection.send(piece)
        except OSError:  # nothing was taken for a second
            self.close_connection = True
        self.script.taken.put(sent)

    def log_message(self, *args: object) -> None:
        """Stay silent."""


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def port(script: Script, tmp_path: Path) -> Iterator[int]:
    """The port of nginx in front of the scripted tier."""
    handler = type("ScriptedHandler", (Handler,), {"script": script})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with running_nginx(server.server_address[1], tmp_path) as listening:
            yield listening
    finally:
        script.chunks.put(None)
        server.shutdown()
        server.server_close()
        thread.join(TIMEOUT_S)


def post(port: int, path: str, body: bytes = b"{}") -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def error_of(response: http.client.HTTPResponse) -> dict[str, object]:
    error: dict[str, object] = json.loads(response.read())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_each_chunk_passes_before_the_next_one_exists(script, port):
    """Tokens held back would make streaming pointless: the second chunk is made after the client has read the first."""
    script.chunks.put(b"data: one\n\n")
    connection, response = post(port, "/v1/chat/completions")
    assert response.status == 200
    assert response.getheader("Content-Type") == "text/event-stream"
    for following in (b"data: two\n\n", b"data: [DONE]\n\n", None):
        assert response.readline().startswith(b"data: ")
        assert response.readline() == b"\n"
        script.chunks.put(following)
    assert response.read() == b""
    connection.close()


def test_a_client_that_leaves_before_any_answer_is_noticed_upstream(script, port):
    """A queued or prefilling request is cancelled although there was nothing to write to its client."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as client:
        client.sendall(b"POST /watch HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        script.requests.get(timeout=TIMEOUT_S)
    assert script.client_left.wait(TIMEOUT_S)


def test_a_client_that_reads_nothing_stops_the_stream_instead_of_filling_a_disk(script, port):
    """nginx must not swallow an answer for a client that takes none: the web tier has to notice and give up."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as client:
        client.sendall(b"POST /flood HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        assert script.taken.get(timeout=TIMEOUT_S) < FLOOD_BYTES


def test_the_upstream_connection_is_kept(script, port):
    """Ten requests, one connection to the web tier."""
    for _ in range(10):
        connection, response = post(port, "/refuse")
        response.read()
        connection.close()
    assert len(script.connections) == 1


def test_the_tier_learns_who_asks_and_answers_for_itself(script, port):
    """The client's address is passed on, and an error of the tier's own reaches the client unchanged."""
    connection, response = post(port, "/refuse", b'{"a": 1}')
    assert (response.status, response.read()) == (429, b'{"error": {"message": "full"}}')
    path, headers, body = script.requests.get(timeout=TIMEOUT_S)
    assert (path, body) == ("/refuse", b'{"a": 1}')
    assert headers["X-Forwarded-For"] == "127.0.0.1"
    assert headers["Host"] == f"127.0.0.1:{port}"
    connection.close()


def test_a_large_body_arrives_whole(script, port):
    """A body that does not fit in nginx's memory buffer is a long prompt, not an error."""
    body = json.dumps({"prompt": "x" * 1_000_000}).encode()
    connection, response = post(port, "/refuse", body)
    assert response.status == 429
    assert script.requests.get(timeout=TIMEOUT_S)[2] == body
    connection.close()


def test_too_large_a_body_is_refused_in_the_apis_form(script, port):
    """413 with a JSON error, before the web tier sees a byte."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n")
        response = http.client.HTTPResponse(client)
        response.begin()
        assert response.status == 413
        assert error_of(response)["type"] == "invalid_request_error"
    assert script.requests.empty()


def test_too_large_a_header_is_refused_in_the_apis_form(script, port):
    """A header of a megabyte is a 400 with a JSON error."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Big: " + b"a" * 40_000)
        response = http.client.HTTPResponse(client)
        response.begin()
        assert response.status == 400
        assert error_of(response)["type"] == "invalid_request_error"


def test_without_a_web_tier_the_client_is_told_to_come_back(tmp_path):
    """503 with Retry-After and a JSON error instead of nginx's HTML."""
    with running_nginx(free_port(), tmp_path) as listening:
        connection, response = post(listening, "/v1/chat/completions")
        assert response.status == 503
        assert response.getheader("Retry-After") == "1"
        assert error_of(response)["code"] == "not_ready"
        connection.close()
