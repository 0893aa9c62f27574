"""Rude HTTP against real Gunicorn: whatever is sent, there is a clear answer, and the next request is served."""

import gzip
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support import tiny_tokenizer
from tests.support.link_rig import Rig, rig_maker

pytestmark = pytest.mark.timeout(120)

VOCAB_SIZE = tiny_tokenizer.build().get_vocab_size()
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = '{"role": "user", "content": "hi"}'
GOOD = b'{"prompt": [7, 9], "max_tokens": 1}'


@pytest.fixture(scope="module", params=["gevent", "gthread"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One server for all tests: what one of them does to it, the next would notice. Its log must have no traceback."""
    folder = tmp_path_factory.mktemp("rude")
    model = tiny_tokenizer.write(folder / "model")
    for make in rig_maker(folder, request.param, "web.app:create_app()"):
        yield make(worker={"model_path": model, "vocab_size": VOCAB_SIZE, "max_model_len": 4096})


@dataclass
class Answer:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


def request_bytes(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    length = [f"Content-Length: {len(body)}"] if body or method in ("POST", "PUT", "PATCH") else []
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *length, *headers, "", ""]).encode() + body


def read_answer(reader: Any, is_head: bool = False) -> Answer:
    line = reader.readline()
    assert line, "the connection was closed without an answer"
    answer = Answer(int(line.split()[1]))
    while (line := reader.readline().strip()) != b"":
        name, _, value = line.decode().partition(":")
        answer.headers[name.lower()] = value.strip()
    if is_head:
        return answer
    if answer.headers.get("transfer-encoding") == "chunked":
        while size := int(reader.readline(), 16):
            answer.body += reader.read(size)
            reader.readline()
        reader.readline()
    else:
        answer.body = reader.read(int(answer.headers.get("content-length", 0)))
    return answer


def exchange(rig: Rig, *messages: bytes, is_head: bool = False) -> list[Answer]:
    """Send some requests on one connection at once and return as many answers."""
    with socket.create_connection(("127.0.0.1", rig.port), timeout=30) as client:
        client.sendall(b"".join(messages))
        reader = client.makefile("rb")
        return [read_answer(reader, is_head) for _ in messages]


def check_serves(rig: Rig) -> None:
    [answer] = exchange(rig, request_bytes("POST", TEXT, GOOD))
    assert answer.status == 200, answer.body
    rig.observer.wait_idle()


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat", "/v1/chat/completions/", "/v1/%00", "/..;/ready"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_paths_that_do_not_exist(rig: Rig, method: str, path: str) -> None:
    [answer] = exchange(rig, request_bytes(method, path))
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    check_serves(rig)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", TEXT, "POST"),
        ("DELETE", CHAT, "POST"),
        ("POST", "/v1/models", "GET"),
        ("POST", "/health", "GET"),
        ("PATCH", "/ready", "GET"),
        ("BREW", TEXT, "POST"),
    ],
)
def test_methods_that_a_path_does_not_have(rig: Rig, method: str, path: str, allowed: str) -> None:
    [answer] = exchange(rig, request_bytes(method, path))
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    assert allowed in answer.headers["allow"].split(", ")
    check_serves(rig)


def test_head_and_options(rig: Rig) -> None:
    """Probes of load balancers: HEAD is GET without the body, OPTIONS says what there is."""
    for path in ("/health", "/ready", "/v1/models"):
        [answer] = exchange(rig, request_bytes("HEAD", path), is_head=True)
        assert answer.status == 200
    [answer] = exchange(rig, request_bytes("OPTIONS", CHAT))
    assert (answer.status, "POST" in answer.headers["allow"]) == (200, True)


BODIES = {
    "gzip": gzip.compress(GOOD),
    "UTF-16": GOOD.decode().encode("utf-16"),
    "UTF-8 with a byte order mark, cut": b"\xef\xbb\xbf{",
    "a number": b"17",
    "null": b"null",
    "a string": b'"hi"',
    "two objects": GOOD + GOOD,
    "a trailing comma": b'{"prompt": [7],}',
    "single quotes": b"{'prompt': [7]}",
    "infinity": b'{"prompt": [7], "temperature": Infinity}',
    "a huge number": b'{"prompt": [7], "temperature": 1e999}',
    "an integer of 10,000 digits": b'{"prompt": [7], "max_tokens": 1' + b"0" * 10_000 + b"}",
    "a huge integer": b'{"prompt": [7], "seed": 99999999999999999999999999}',
    "depth": b'{"prompt": ' + b"[" * 20_000,
    "NUL": b"\x00",
    "a form": b"prompt=hi&max_tokens=1",
    "no prompt": b"{}",
    "an empty prompt": b'{"prompt": ""}',
    "an object as prompt": b'{"prompt": {"a": 1}}',
    "mixed prompts": b'{"prompt": ["hi", [1]]}',
    "booleans as ids": b'{"prompt": [true]}',
    "floats as ids": b'{"prompt": [1.5]}',
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_no_request(rig: Rig, name: str) -> None:
    [answer, good] = exchange(rig, request_bytes("POST", TEXT, BODIES[name]), request_bytes("POST", TEXT, GOOD))
    assert answer.status == 400, answer.body
    assert answer.error["type"] == "invalid_request_error"
    assert good.status == 200, good.body
    rig.observer.wait_idle()


SERVED = {
    "duplicate keys": (TEXT, b'{"prompt": "no", "prompt": [7, 9], "max_tokens": 9, "max_tokens": 1}'),
    "NUL in a text": (TEXT, b'{"prompt": "a\\u0000b", "max_tokens": 1}'),
    "a pair of surrogates": (TEXT, b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}'),
    "many messages": (CHAT, f'{{"messages": [{", ".join([HI] * 100)}], "max_tokens": 1}}'.encode()),
    "white space around": (TEXT, b" \r\n\t" + GOOD + b"\n\n"),
}


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "application/x-www-form-urlencoded", ";;;"])
def test_odd_requests_that_are_whole(rig: Rig, name: str, content_type: str) -> None:
    path, body = SERVED[name]
    [answer] = exchange(rig, request_bytes("POST", path, body, f"Content-Type: {content_type}"))
    assert answer.status == 200, answer.body
    assert json.loads(answer.body)["usage"]["completion_tokens"] == 1


def test_more_messages_than_the_context_holds(rig: Rig) -> None:
    body = f'{{"messages": [{", ".join([HI] * 20_000)}], "max_tokens": 1}}'.encode()
    [answer] = exchange(rig, request_bytes("POST", CHAT, body))
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    check_serves(rig)


def test_requests_in_a_pipeline(rig: Rig) -> None:
    """Answers come in the order of the requests, each its own, errors between them."""
    counts = [1, 3, 2, 5]
    messages = [request_bytes("POST", TEXT, json.dumps({"prompt": [7], "max_tokens": n}).encode()) for n in counts]
    messages.insert(2, request_bytes("POST", TEXT, b"{"))
    answers = exchange(rig, *messages)
    assert [answer.status for answer in answers] == [200, 200, 400, 200, 200]
    usages = [json.loads(answer.body)["usage"]["completion_tokens"] for answer in answers if answer.status == 200]
    assert usages == counts


def test_a_body_in_many_small_pieces(rig: Rig) -> None:
    """In chunks of one byte, and slowly."""
    with socket.create_connection(("127.0.0.1", rig.port), timeout=30) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for byte in GOOD:
            client.sendall(b"1\r\n" + bytes([byte]) + b"\r\n")
            time.sleep(0.002)
        client.sendall(b"0\r\n\r\n")
        assert read_answer(client.makefile("rb")).status == 200


def test_a_body_that_is_cut(rig: Rig) -> None:
    """The client leaves, or closes its half, in the middle of its own request: nothing reaches the worker."""
    head = request_bytes("POST", TEXT, GOOD)
    for at in (10, len(head) - len(GOOD), len(head) - 5):
        with socket.create_connection(("127.0.0.1", rig.port), timeout=30) as client:
            client.sendall(head[:at])
        with socket.create_connection(("127.0.0.1", rig.port), timeout=30) as client:
            client.sendall(head[:at])
            client.shutdown(socket.SHUT_WR)
            status = client.makefile("rb").readline().split()[1:2]
            assert not status or 400 <= int(status[0]) < 500
    check_serves(rig)


GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"GET\r\n\r\n",
    b"\x00" * 100 + b"\r\n\r\n",
    b"SSH-2.0-x\r\n\r\n",
    b"POST / HTTP/9.9\r\n\r\n",
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_is_no_http(rig: Rig, garbage: bytes) -> None:
    """TLS to the plain port, noise, another protocol: refused or hung up on, without a trace in the log."""
    with socket.create_connection(("127.0.0.1", rig.port), timeout=30) as client:
        client.sendall(garbage)
        client.shutdown(socket.SHUT_WR)
        first = client.makefile("rb").readline()
    assert not first or first.split()[1].startswith(b"4")
    check_serves(rig)


SMUGGLED = [
    ("Content-Length: 5", "Transfer-Encoding: chunked"),
    ("Content-Length: 5", "Content-Length: 6"),
    ("Content-Length: -1",),
    ("Content-Length: 1e3",),
    ("Transfer-Encoding: chunked, identity",),
    ("Transfer-Encoding: xchunked",),
    ("Transfer-Encoding : chunked",),
]


@pytest.mark.parametrize("headers", SMUGGLED, ids=" | ".join)
def test_lengths_that_two_servers_could_read_in_two_ways(rig: Rig, headers: tuple[str, ...]) -> None:
    """Only one answer, a refusal, and nothing of what follows is taken for a second request."""
    inner = request_bytes("GET", "/v1/models")
    with socket.create_connection(("127.0.0.1", rig.port), timeout=30) as client:
        head = "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: x", *headers, "", ""]).encode()
        client.sendall(head + b"0\r\n\r\n" + inner)
        reader = client.makefile("rb")
        assert 400 <= int(reader.readline().split()[1]) < 600
        assert b" 200 " not in reader.read()
    check_serves(rig)


@pytest.mark.parametrize("count", [1000, 1024])
def test_a_request_of_very_many_prompts(rig: Rig, count: int) -> None:
    body = json.dumps({"prompt": [[7, index % 200 + 1] for index in range(count)], "max_tokens": 2}).encode()
    [answer] = exchange(rig, request_bytes("POST", TEXT, body))
    assert answer.status == 200, answer.body[:300]
    found = json.loads(answer.body)
    assert [choice["index"] for choice in found["choices"]] == list(range(count))
    assert found["usage"]["completion_tokens"] == 2 * count
    rig.observer.wait_idle()


def test_a_request_of_too_many_prompts(rig: Rig) -> None:
    body = json.dumps({"prompt": [[7]] * 1025, "max_tokens": 2}).encode()
    [answer] = exchange(rig, request_bytes("POST", TEXT, body))
    assert (answer.status, answer.error["param"]) == (400, "n")
    check_serves(rig)


def test_the_log_has_no_trace_and_no_prompt(rig: Rig) -> None:
    secret = "xyzzy-plugh"
    for body in (b"{", f'{{"prompt": "{secret}", "max_tokens": 0}}'.encode(), f'{{"prompt": "{secret}"'.encode()):
        exchange(rig, request_bytes("POST", TEXT, body))
    exchange(rig, request_bytes("POST", TEXT, f'{{"prompt": "{secret}", "max_tokens": 1}}'.encode()))
    exchange(rig, request_bytes("GET", f"/{secret}"))
    log = rig.log()
    assert "Traceback" not in log
    assert secret not in log
