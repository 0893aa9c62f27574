"""One request over HTTP, timed: sends it with aiohttp, reads the raw body as it arrives, returns a RequestRecord.

Runs on the asyncio loop of the benchmark. Never raises for what a server does: every failure becomes a kind in the
record. Never retries, never follows a redirect.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from cli.bench.prompts import PromptSource
from cli.bench.sse import SSEParser
from cli.bench.stats import RequestRecord
from cli.bench.stream import CompletionStream, StreamRules

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
MAX_ERROR_BYTES = 4096


@dataclass(frozen=True)
class Target:
    """What to ask, of whom. `endpoint` is a key of PATHS; `extra_body` is merged over the fields made here."""

    url: str
    model: str
    endpoint: str = "chat"
    max_tokens: int = 64
    ignore_eos: bool = True
    ask_usage: bool = True
    temperature: float = 0.0
    timeout_s: float = 600.0
    api_key: str = ""
    rules: StreamRules = field(default_factory=StreamRules)
    extra_body: dict[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request; no compression, which would hold chunks back."""
        auth = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Accept-Encoding": "identity", **auth}

    def body(self, prompt: str) -> dict[str, Any]:
        """The JSON body that asks for a stream of `max_tokens` tokens after `prompt`."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "max_tokens": self.max_tokens}
        body["temperature"] = self.temperature
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.ask_usage:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | self.extra_body


class BenchClient:
    """Sends the requests of one run over one pool of connections."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        prompts: PromptSource,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._session, self._target, self._prompts, self._clock = session, target, prompts, clock

    async def send(self, index: int, intended_s: float | None = None) -> RequestRecord:
        """Perform request `index`. Latencies count from `intended_s`, or from the moment of sending when it is None."""
        body = self._target.body(self._prompts.prompt(index))
        stream = CompletionStream(self._target.rules)
        sent_s = self._clock()
        try:
            await self._exchange(body, stream)
        except TimeoutError:
            stream.fail("timeout", f"not finished after {self._target.timeout_s:g} s")
        except aiohttp.ClientConnectorError as error:
            stream.fail("connect", str(error))
        except (aiohttp.ClientError, OSError) as error:
            stream.fail("broken", f"{type(error).__name__}: {error}")
        return RequestRecord(
            index=index,
            start_s=sent_s if intended_s is None else intended_s,
            sent_s=sent_s,
            end_s=self._clock(),
            text_times_s=stream.text_times_s,
            output_tokens=stream.output_tokens,
            prompt_tokens=stream.prompt_tokens,
            cached_tokens=stream.cached_tokens,
            finish_reason=stream.finish_reason,
            error=stream.error,
            detail=stream.detail,
        )

    async def _exchange(self, body: dict[str, Any], stream: CompletionStream) -> None:
        url = self._target.url + PATHS[self._target.endpoint]
        timeout = aiohttp.ClientTimeout(total=self._target.timeout_s)
        async with self._session.post(
            url, json=body, headers=self._target.headers, timeout=timeout, allow_redirects=False
        ) as response:
            if response.status != 200:
                text = await response.content.read(MAX_ERROR_BYTES)
                return stream.fail(f"http_{response.status}", text.decode("utf-8", errors="replace"))
            parser = SSEParser()
            async for data in response.content.iter_any():
                at_s = self._clock()
                for event in parser.feed(data):
                    stream.read(event, at_s)
            stream.end(parser.truncated)


async def find_model(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> str:
    """The first model that `/v1/models` lists. Raises ValueError when the server does not answer or lists none."""
    try:
        async with session.get(f"{url}/v1/models", headers=headers) as response:
            response.raise_for_status()
            listing = await response.json(content_type=None)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ValueError(f"{url}/v1/models does not answer: {error}") from None
    models = listing.get("data") if isinstance(listing, dict) else None
    if not models:
        raise ValueError(f"{url}/v1/models lists no model; name one with --model")
    return str(models[0]["id"])
