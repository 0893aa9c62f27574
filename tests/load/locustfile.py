"""A locust load of streamed chats, with time to first token and inter-token latency taken from the bytes.

    locust -f tests/load/locustfile.py --headless -u 16 -r 16 -t 60s --host http://127.0.0.1:8000

Reports, beside the request itself, the custom metrics TTFT and ITL (milliseconds) and tokens (number a request, under
"Average" where locust prints a time). A stream that breaks, carries an error or ends without [DONE] is a failure. The
definitions are those of docs/BENCHMARKS.md; this file and `tokenloom bench` share the code that applies them.
Lines are read from the raw response: FastHttpUser.iter_lines hands them on in blocks of 1 KiB, which hides every gap.
"""

import itertools
import json
import time

from locust import FastHttpUser, events, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import FastResponse
from locust.env import Environment
from locust.event import EventHook

from cli.bench.prompts import WordPrompts
from cli.bench.sse import SSEParser
from cli.bench.stats import RequestRecord
from cli.bench.stream import CompletionStream

CHAT = "/v1/chat/completions"
HEADERS = {"Accept-Encoding": "identity"}  # compression would hold chunks back
indexes = itertools.count()


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    """Options of the load; locust also shows them in its web form."""
    parser.add_argument("--model", default="", help="model name; the first of /v1/models if not given")
    parser.add_argument("--prompt-words", type=int, default=100, help="words of each prompt, all different")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer (sent with ignore_eos)")
    parser.add_argument("--seed", type=int, default=0, help="fixes the prompts")


class StreamingChatUser(FastHttpUser):
    """One user of a closed loop: asks, reads the stream to its end, asks again."""

    network_timeout = 600.0

    def on_start(self) -> None:
        """Learn the model's name once a user."""
        options = self.environment.parsed_options
        self.prompts = WordPrompts(options.prompt_words, seed=options.seed)
        self.model = options.model or self.client.get("/v1/models").json()["data"][0]["id"]

    @task
    def chat(self) -> None:
        """One streamed chat with a prompt that nobody else sends."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": self.prompts.prompt(next(indexes))}],
            "max_tokens": self.environment.parsed_options.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start_s = time.perf_counter()
        with self.client.post(CHAT, json=body, headers=HEADERS, stream=True, catch_response=True) as response:
            stream = read_stream(response)
            end_s = time.perf_counter()
            # locust stopped its clock at the headers; the request lasts until the end of its stream.
            response.request_meta["response_time"] = (end_s - start_s) * 1000
            if stream.error:
                response.failure(f"{stream.error}: {stream.detail}" if stream.error != "no_done" else stream.error)
                return
            response.success()
        record = RequestRecord(0, start_s, start_s, end_s, stream.text_times_s, output_tokens=stream.output_tokens)
        report(self.environment.events.request, record)


def read_stream(response: FastResponse) -> CompletionStream:
    """Read the raw response line by line as the socket delivers it, and judge the stream."""
    stream, parser, raw = CompletionStream(), SSEParser(), response._response
    if response.status_code != 200 or raw is None:
        stream.fail(f"http_{response.status_code}", response.text or "")
        return stream
    try:
        while line := raw.readline(b"\n"):
            at_s = time.perf_counter()
            for event in parser.feed(line):
                stream.read(event, at_s)
        stream.end(parser.truncated)
    except Exception as error:  # noqa: BLE001 (whatever geventhttpclient raises for a torn connection)
        stream.fail("broken", f"{type(error).__name__}: {error}")
    finally:
        raw.release()
    return stream


def report(fire: EventHook, record: RequestRecord) -> None:
    """Fire the custom metrics of one success."""

    def metric(name: str, value: float) -> None:
        fire.fire(request_type="METRIC", name=name, response_time=value, response_length=0, exception=None, context={})

    metric("TTFT", (record.ttft_s or 0.0) * 1000)
    for gap_s in record.itl_s:
        metric("ITL", gap_s * 1000)
    metric("tokens", record.output_tokens or 0)


@events.quitting.add_listener
def print_totals(environment: Environment, **_: object) -> None:
    """Print output tokens per second over the whole run, and the counts they rest on, as one line of JSON."""
    stats = environment.stats
    tokens, total = stats.get("tokens", "METRIC"), stats.get(CHAT, "POST")
    lasted_s = (stats.last_request_timestamp or 0) - (stats.start_time or 0)
    totals = {
        "requests": total.num_requests,
        "failures": total.num_failures,
        "output_tokens": round(tokens.total_response_time),
        "output_tokens_per_s": round(tokens.total_response_time / lasted_s, 2) if lasted_s > 0 else 0.0,
    }
    print("TOTALS " + json.dumps(totals))
