"""A small OpenAI-compatible server that says exactly what a test scripts: a socket, no framework, no model.

Runs its own asyncio loop on one thread. The `model` of a request names the script it gets (a key of SCRIPTS), so that
one server can be good and bad at once.
"""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

Piece = bytes | float | None
"""Body bytes sent as one chunk; or a pause in seconds; or None: cut the connection with a reset."""


def event(payload: dict[str, Any] | str) -> bytes:
    """One SSE event of a JSON payload or of raw text."""
    data = payload if isinstance(payload, str) else json.dumps(payload)
    return f"data: {data}\n\n".encode()


def chunk(body: dict[str, Any], text: str = "", finish: str | None = None) -> dict[str, Any]:
    """A chunk in the form of the endpoint that `body` was sent to."""
    if "messages" in body:
        delta = {"content": text} if text else {}
        return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def usage(body: dict[str, Any]) -> dict[str, Any]:
    """The usage chunk: as many tokens as asked for, and words of the prompt."""
    prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    counts = {"prompt_tokens": len(prompt.split()), "completion_tokens": body["max_tokens"]}
    return {"choices": [], "usage": counts | {"prompt_tokens_details": {"cached_tokens": 0}}}


def good(body: dict[str, Any]) -> list[Piece]:
    """Role delta, a comment, one token a chunk with a pause before each, finish reason, usage, [DONE]."""
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    tokens = [piece for i in range(body["max_tokens"]) for piece in (0.002, event(chunk(body, f" t{i}")))]
    return [event(role), b": ping\n\n", *tokens, event(chunk(body, finish="length")), event(usage(body)), DONE]


DONE = event("[DONE]")


def ragged(body: dict[str, Any]) -> list[Piece]:
    """The good stream with CRLF line ends, cut every seven bytes."""
    whole = b"".join(piece for piece in good(body) if isinstance(piece, bytes)).replace(b"\n", b"\r\n")
    return [whole[i : i + 7] for i in range(0, len(whole), 7)]


def no_done(body: dict[str, Any]) -> list[Piece]:
    """All but [DONE]."""
    return good(body)[:-1]


def error_event(body: dict[str, Any]) -> list[Piece]:
    """An error in the middle, then [DONE]."""
    return [event(chunk(body, "a")), event({"error": {"message": "boom", "code": "internal_error"}}), DONE]


def reset(body: dict[str, Any]) -> list[Piece]:
    """The connection breaks in the middle."""
    return [event(chunk(body, "a")), 0.02, None]


def hang(body: dict[str, Any]) -> list[Piece]:
    """Nothing after the first token for longer than any test waits."""
    return [event(chunk(body, "a")), 600.0]


def no_usage(body: dict[str, Any]) -> list[Piece]:
    """A server that counts nothing."""
    return [piece for piece in good(body) if piece != event(usage(body))]


def short(body: dict[str, Any]) -> list[Piece]:
    """A server that stops one token early."""
    return good(body | {"max_tokens": body["max_tokens"] - 1})


SCRIPTS: dict[str, Callable[[dict[str, Any]], list[Piece]]] = {
    script.__name__: script for script in (good, ragged, no_done, error_event, reset, hang, no_usage, short)
}


@dataclass
class ScriptedServer:
    """Context manager: listens on `port` of loopback (0: a free one). `bodies` are the request bodies, in order.

    The first `not_ready_answers` requests for its models are answered like those of a server that loads.
    """

    default_model: str = "good"
    not_ready_answers: int = 0
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    peak_in_flight: int = 0
    url: str = ""
    _in_flight: int = 0

    def __enter__(self) -> "ScriptedServer":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._connection, "127.0.0.1", self.port)

    async def _close(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False when the connection is over."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        payload = await reader.readexactly(int(headers.get("content-length", "0")))
        if head.startswith("GET "):
            if self.not_ready_answers > 0:
                self.not_ready_answers -= 1
                return await _answer(writer, 503, {"error": {"message": "the worker is loading the model"}})
            return await _answer(writer, 200, {"data": [{"id": self.default_model}]})
        body = json.loads(payload)
        self.bodies.append(body)
        if body["model"] == "busy":
            return await _answer(writer, 429, {"error": {"message": "queue full", "code": "queue_full"}})
        self._in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self._in_flight)
        try:
            return await _stream(writer, SCRIPTS[body["model"]](body))
        finally:
            self._in_flight -= 1


async def _answer(writer: asyncio.StreamWriter, status: int, payload: dict[str, Any]) -> bool:
    data = json.dumps(payload).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return True


async def _stream(writer: asyncio.StreamWriter, pieces: list[Piece]) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    for piece in pieces:
        if piece is None:
            writer.transport.abort()
            return False
        if isinstance(piece, float):
            await asyncio.sleep(piece)
            continue
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return True


if __name__ == "__main__":
    with ScriptedServer(default_model=sys.argv[1], port=int(sys.argv[2])):
        while True:
            time.sleep(1.0)
