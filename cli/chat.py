"""`tokenloom chat`: a conversation with a running server, in the terminal, over its public API only.

Standard library HTTP. Keeps the messages; never imports web or worker.
"""

import http.client
import json
import sys
import urllib.parse
from collections.abc import Iterator
from typing import Any

TIMEOUT_S = 600.0
HELP = "/reset starts over, /quit or Ctrl-D leaves, Ctrl-C stops an answer."

Message = dict[str, str]


class ChatError(Exception):
    """The server refused, or broke off; the message is for the user."""


class ChatClient:
    """Speaks to one OpenAI-compatible server at `url`, with or without /v1 at its end."""

    def __init__(self, url: str, key: str = ""):
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        self._https = parts.scheme == "https"
        self._netloc = parts.netloc
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def models(self) -> list[str]:
        """Return the names of the models served. Raises ChatError."""
        connection = self._connect()
        try:
            response = self._send(connection, "GET", "/models")
            return [str(model["id"]) for model in json.loads(response.read())["data"]]
        except (ValueError, LookupError, TypeError):
            raise ChatError(f"what answers at {self._netloc} does not speak the OpenAI API") from None
        finally:
            connection.close()

    def stream(self, model: str, messages: list[Message], settings: dict[str, Any]) -> Iterator[str]:
        """Yield the pieces of the answer's text as they come. Raises ChatError."""
        body = json.dumps({"model": model, "messages": messages, "stream": True, **settings})
        connection = self._connect()
        try:
            response = self._send(connection, "POST", "/chat/completions", body)
            yield from _texts(response)
        finally:  # also when the caller stops early: closing is how the server learns of it
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        return kind(self._netloc, timeout=TIMEOUT_S)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: str | None = None
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, self._base + path, body, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"cannot reach the server at {self._netloc}: {error}") from None
        if response.status != 200:
            raise ChatError(f"the server answered {response.status}: {_error_message(response.read())}")
        return response


def _texts(response: http.client.HTTPResponse) -> Iterator[str]:
    """Parse server-sent events into the text of their deltas, until [DONE]."""
    try:
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                raise ChatError(_error_message(data))
            for choice in chunk.get("choices", []):
                if text := choice.get("delta", {}).get("content"):
                    yield text
    except (OSError, http.client.HTTPException) as error:
        raise ChatError(f"the stream broke off: {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ChatError("the server sent something that is not a chat completion") from None
    raise ChatError("the stream ended before it was done")


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode(errors="replace").strip() or "nothing"


def repl(client: ChatClient, model: str, system: str, settings: dict[str, Any]) -> int:
    """Read lines and print answers until the user leaves; return the exit code."""
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    try:
        model = model or next(iter(client.models()), "")
        print(f"{model}. {HELP}")
        while (line := input("> ").strip()) != "/quit":
            if line == "/reset":
                messages = list(start)
            elif line:
                messages = _turn(client, model, [*messages, {"role": "user", "content": line}], settings)
    except (EOFError, KeyboardInterrupt):
        print()
    except ChatError as error:
        print(f"tokenloom: {error}", file=sys.stderr)
        return 1
    return 0


def _turn(client: ChatClient, model: str, messages: list[Message], settings: dict[str, Any]) -> list[Message]:
    """Print one answer and return the conversation with it, or without the question when there was no answer."""
    answer = ""
    try:
        for text in client.stream(model, messages, settings):
            print(text, end="", flush=True)
            answer += text
    except KeyboardInterrupt:
        pass
    except ChatError as error:
        print(f"tokenloom: {error}", file=sys.stderr)
        return messages[:-1]
    print()
    return [*messages, {"role": "assistant", "content": answer}] if answer else messages[:-1]
