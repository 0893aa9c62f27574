"""`tokenloom chat`: a conversation with a running server, in the terminal, over its public API only.

Standard library HTTP. Keeps the messages; never imports web or worker. With a terminal it prompts; from a pipe it takes
one question a line and prints nothing but the answers.
"""

import http.client
import json
import os
import sys
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

from common.errors import ConfigError

TIMEOUT_S = 600.0
WAIT_S = 120.0
"""How long a server may take to come up."""
POLL_S = 0.5
HELP = "/reset starts over, /quit or Ctrl-D leaves, Ctrl-C stops an answer."

Message = dict[str, str]


class ChatError(Exception):
    """The server refused, or broke off; the message is for the user."""


class NotReady(ChatError):
    """Nobody listens at the address yet, or the server has not loaded its model."""


class ChatClient:
    """Speaks to one OpenAI-compatible server at `url`, with or without /v1 at its end.

    Raises ConfigError for what is no address.
    """

    def __init__(self, url: str, key: str = ""):
        try:
            parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
            port_is_fine = parts.port is None or parts.port > 0
        except ValueError:
            port_is_fine = False
        if not port_is_fine or parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("url", f"must be an address like http://127.0.0.1:8000, not {url!r}")
        self._https = parts.scheme == "https"
        self._netloc = parts.netloc
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if key.strip():
            self._headers["Authorization"] = f"Bearer {key.strip()}"

    def models(self) -> list[str]:
        """Return the names of the models served. Raises NotReady while there is none yet, ChatError for the rest."""
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
            if response.getheader("Content-Type", "").partition(";")[0].strip() != "text/event-stream":
                raise ChatError("the server's answer is not a stream of events")
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
        except ConnectionRefusedError:
            raise NotReady(f"cannot reach the server at {self._netloc}: nothing listens there") from None
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a key that no header can hold
            raise ChatError(f"cannot reach the server at {self._netloc}: {error}") from None
        if response.status == 503:
            raise NotReady(f"the server is not ready: {_error_message(_body(response))}")
        if response.status != 200:
            raise ChatError(f"the server answered {response.status}: {_error_message(_body(response))}")
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


def _body(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read()
    except (OSError, http.client.HTTPException):  # it broke off; the status says enough
        return b""


def _error_message(body: bytes) -> str:
    """Return what an error's body says, on one line."""
    try:
        text = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        text = body[:200].decode(errors="replace")
    return " ".join(text.split()) or "nothing"


def repl(client: ChatClient, model: str, system: str, settings: dict[str, Any], wait_s: float = WAIT_S) -> int:
    """Read lines and print answers until the user leaves; return the exit code.

    Waits up to `wait_s` for a server that is not there yet. The exit code is 1 when there was none, and, without a
    terminal, when a question got no answer.
    """
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    at_terminal = sys.stdin.isatty()
    failed = False
    try:
        model = _wait_for_model(client, model, wait_s)
        if at_terminal:
            print(f"{model}. {HELP}")
        while (line := _read_line(at_terminal)) != "/quit":
            if line == "/reset":
                messages = list(start)
            elif line:
                asked = [*messages, {"role": "user", "content": line}]
                answer = _answer(client, model, asked, settings)
                failed = failed or answer is None
                if answer:  # else the question is forgotten
                    messages = [*asked, {"role": "assistant", "content": answer}]
    except (EOFError, KeyboardInterrupt):
        if at_terminal:
            print()
    except ChatError as error:
        print(f"tokenloom: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read the answers has gone; Python would complain when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 1 if failed and not at_terminal else 0


def _wait_for_model(client: ChatClient, model: str, wait_s: float) -> str:
    """Return the model to talk to, once the server lists its models. Raises ChatError, NotReady after `wait_s`."""
    give_up_at_s = time.monotonic() + wait_s
    told = False
    while True:
        try:
            listed = client.models()
            return model or next(iter(listed), "")
        except NotReady as error:
            if time.monotonic() >= give_up_at_s:
                raise
            if not told:
                told = True
                print(f"{error}; waiting for it, up to {wait_s:g} s (Ctrl-C ends this)", file=sys.stderr)
            time.sleep(POLL_S)
        except ChatError:
            if not model:
                raise
            return model  # not every server lists its models


def _read_line(at_terminal: bool) -> str:
    """Return the next line of the input. Raises EOFError at its end and ChatError for what is no text."""
    try:
        if at_terminal:
            return input("> ").strip()
        line = sys.stdin.readline()
    except UnicodeDecodeError:
        raise ChatError("the input is not text in UTF-8") from None
    if not line:
        raise EOFError
    return line.strip()


def _answer(client: ChatClient, model: str, messages: list[Message], settings: dict[str, Any]) -> str | None:
    """Print one answer and return it, as far as it came before Ctrl-C; None when the server failed."""
    answer = ""
    try:
        for text in client.stream(model, messages, settings):
            print(text, end="", flush=True)
            answer += text
    except KeyboardInterrupt:
        pass
    except ChatError as error:
        if answer:
            print(flush=True)
        print(f"tokenloom: {error}", file=sys.stderr)
        return None
    print(flush=True)
    return answer
