"""`tokenloom bench`: options to a run, a run to a report. Thin: everything it does is in its sibling modules."""

import asyncio
import json
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cli.bench.load import arrival_schedule, closed_loop, open_loop
from cli.bench.prompts import PromptSource, TokenPrompts, WordPrompts
from cli.bench.report import latency_table, report_lines
from cli.bench.stats import RequestRecord, summarize
from cli.bench.stream import StreamRules
from cli.options import integer, number

if TYPE_CHECKING:
    from cli.bench.client import Target


class Endpoint(StrEnum):
    """Which API to load."""

    CHAT = "chat"
    COMPLETIONS = "completions"


class Count(StrEnum):
    """Where the number of output tokens comes from."""

    USAGE = "usage"
    CHUNKS = "chunks"


@dataclass(frozen=True)
class Load:
    """How much to send: an open loop when `rate_per_s` is set, else a closed loop of `concurrency`."""

    concurrency: int = 16
    rate_per_s: float | None = None
    requests: int | None = None
    duration_s: float | None = None
    warmup: int = 0
    seed: int = 0


async def resolve_model_name(target: "Target") -> "Target":
    """`target` with a model name: its own, or the first that the server lists. Raises ValueError when there is none."""
    import aiohttp

    from cli.bench.client import find_model

    if target.model:
        return target
    async with aiohttp.ClientSession() as session:
        return replace(target, model=await find_model(session, target.url, target.headers))


async def run_load(target: "Target", prompts: PromptSource, load: Load) -> list[RequestRecord]:
    """Warm up, then run one load against one target; one record a measured request, in order of completion."""
    import aiohttp

    from cli.bench.client import BenchClient

    # Below the idle limit of any server, so that none closes a connection just as a request goes out on it.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0)
    async with aiohttp.ClientSession(connector=connector) as session:
        client = BenchClient(session, target, prompts)
        if load.warmup:
            # Indexes below zero: no measured request has the prompt of one that warmed up.
            await closed_loop(lambda index, _: client.send(-1 - index), min(load.warmup, load.concurrency), load.warmup)
        if load.rate_per_s is not None:
            arrivals = arrival_schedule(load.rate_per_s, load.seed, load.requests, load.duration_s)
            return await open_loop(client.send, arrivals)
        return await closed_loop(client.send, load.concurrency, load.requests, load.duration_s)


_count = partial(typer.Option, parser=integer(1), metavar="N")
_amount = partial(typer.Option, parser=integer(0), metavar="N")
_seconds = partial(typer.Option, parser=number(0.001), metavar="SECONDS")
_rate = partial(typer.Option, parser=number(1e-6), metavar="NUMBER")
_temperature = partial(typer.Option, parser=number(0), metavar="NUMBER")


def bench(
    url: Annotated[str, typer.Option(help="Base URL of an OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model name; the first that /v1/models lists if not given.")] = "",
    endpoint: Annotated[Endpoint, typer.Option(help="API to load.")] = Endpoint.CHAT,
    concurrency: Annotated[int, _count("--concurrency", "-c", help="Closed loop: in flight.")] = 16,
    rate: Annotated[float | None, _rate(help="Open loop: Poisson arrivals per second.")] = None,
    requests: Annotated[int | None, _count("--requests", "-n", help="Stop after so many.")] = None,
    duration: Annotated[float | None, _seconds(help="Start none after so many seconds.")] = None,
    warmup: Annotated[int, _amount(help="Requests sent before, and not measured.")] = 0,
    prompt_tokens: Annotated[int, _count(help="Prompt length (words without --tokenizer).")] = 128,
    shared_prefix: Annotated[int, _amount(help="So many of them the same for all requests.")] = 0,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with tokenizer.json: exact prompt lengths.")] = None,
    max_tokens: Annotated[int, _count(help="Output length.")] = 64,
    ignore_eos: Annotated[bool, typer.Option(help="Send ignore_eos; some servers refuse it.")] = True,
    ask_usage: Annotated[bool, typer.Option(help="Send stream_options.include_usage.")] = True,
    count: Annotated[Count, typer.Option(help="Output tokens from usage, or one a text chunk.")] = Count.USAGE,
    expect_done: Annotated[bool, typer.Option(help="A stream without [DONE] is a failure.")] = True,
    temperature: Annotated[float, _temperature(help="Randomness; 0 is greedy.")] = 0.0,
    extra_body: Annotated[str, typer.Option(help="JSON object merged into every request body.")] = "{}",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", show_default=False)] = "",
    timeout: Annotated[float, _seconds(help="Seconds until a request counts as failed.")] = 600.0,
    seed: Annotated[int, _amount(help="Fixes prompts and arrivals.")] = 0,
    json_out: Annotated[str, typer.Option("--json", metavar="FILE", help="Write figures as JSON; - is stdout.")] = "",
) -> None:
    """Load any OpenAI-compatible server with streams and report TTFT, ITL, TPOT, E2E and tokens per second.

    A closed loop keeps --concurrency requests in flight; --rate makes it an open loop, with latencies counted from the
    intended arrivals. Exits with 1 when any request failed, 2 when the run could not start.
    """
    console = Console(stderr=json_out == "-")
    try:
        from cli.bench.client import Target
    except ImportError:
        console.print("tokenloom bench needs its extra: make install-dev, or pip install -e '.\\[bench]'")
        raise typer.Exit(2) from None

    if requests is None and duration is None:
        requests = 4 * concurrency
    load = Load(concurrency, rate, requests, duration, warmup, seed)
    target = Target(
        url=url.rstrip("/").removesuffix("/v1"),
        model=model,
        endpoint=endpoint.value,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        ask_usage=ask_usage,
        temperature=temperature,
        timeout_s=timeout,
        api_key=api_key,
        rules=StreamRules(expect_done=expect_done, count=count.value),
        extra_body=_json_object(extra_body),
    )
    try:
        prompts = _prompts(tokenizer, prompt_tokens, shared_prefix, seed, endpoint)
        target = asyncio.run(resolve_model_name(target))
        records = asyncio.run(run_load(target, prompts, load))
    except (ValueError, OSError) as error:
        console.print(f"bench: {error}", markup=False)
        raise typer.Exit(2) from None
    summary = summarize(records, max_tokens)
    _report(console, summary)
    _write_json(json_out, {"config": _config(target, load, prompt_tokens, shared_prefix, tokenizer), **summary})
    if summary["failed"]:
        raise typer.Exit(1)


def _prompts(tokenizer: Path | None, length: int, shared_prefix: int, seed: int, endpoint: Endpoint) -> PromptSource:
    if tokenizer is None:
        return WordPrompts(length, shared_prefix, seed)
    return TokenPrompts(tokenizer, length, shared_prefix, seed, special_tokens=endpoint == Endpoint.COMPLETIONS)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--extra-body") from None
    if not isinstance(value, dict):
        raise typer.BadParameter("not a JSON object", param_hint="--extra-body")
    return value


def _config(
    target: "Target", load: Load, prompt_tokens: int, shared_prefix: int, tokenizer: Path | None
) -> dict[str, Any]:
    """What was asked, for the JSON output; never the key."""
    return {
        "url": target.url,
        "model": target.model,
        "endpoint": target.endpoint,
        "max_tokens": target.max_tokens,
        "ignore_eos": target.ignore_eos,
        "temperature": target.temperature,
        "count": target.rules.count,
        "expect_done": target.rules.expect_done,
        "extra_body": target.extra_body,
        "loop": "closed" if load.rate_per_s is None else "open",
        "concurrency": load.concurrency if load.rate_per_s is None else None,
        "rate_per_s": load.rate_per_s,
        "requests": load.requests,
        "duration_s": load.duration_s,
        "warmup": load.warmup,
        "seed": load.seed,
        "prompt_length": prompt_tokens,
        "prompt_unit": "words" if tokenizer is None else "tokens",
        "shared_prefix": shared_prefix,
    }


def _report(console: Console, summary: dict[str, Any]) -> None:
    console.print(latency_table(summary))
    for line in report_lines(summary):
        console.print(line, markup=False, highlight=False)


def _write_json(destination: str, result: dict[str, Any]) -> None:
    text = json.dumps(result, indent=2) + "\n"
    if destination == "-":
        typer.echo(text, nl=False)
    elif destination:
        Path(destination).write_text(text, encoding="utf-8")
