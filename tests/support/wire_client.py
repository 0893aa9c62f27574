"""A web process reduced to its sockets, for tests of the worker's side of the wire.

As a program it runs one request in a process of its own, which a test can freeze or kill:
python -m tests.support.wire_client SUBMIT_ENDPOINT PUBLISH_ENDPOINT MAX_TOKENS
It prints `first` at the first token and one JSON line at the end.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from common.ids import new_request_id, new_topic
from common.params import SamplingParams
from common.wire import (
    Accepted,
    Batch,
    Cancel,
    Failed,
    Finished,
    Have,
    Heartbeat,
    Message,
    Resync,
    Submit,
    Tokens,
    decode_to_web,
    encode,
)
from tests.support.processes import ROOT

WAIT_S = 20.0


@dataclass
class Answer:
    """What has arrived for one request. repeated: token ids that came again; holes: those that were missing."""

    ids: list[int] = field(default_factory=list)
    accepted: int = 0
    ends: list[Finished | Failed] = field(default_factory=list)
    repeated: int = 0
    holes: int = 0


class WireClient:
    """Talks to the worker at two endpoints. Listens from the start unless `listen` is False; then call `listen`."""

    def __init__(self, submit_endpoint: str, publish_endpoint: str, listen: bool = True, receive_hwm: int = 1000):
        self.topic = new_topic()
        self.answers: dict[str, Answer] = {}
        self.beat: Heartbeat | None = None
        self.states: list[str] = []
        self.incarnations: list[str] = []
        self.seq = 0
        self._publish_endpoint = publish_endpoint
        self._receive_hwm = receive_hwm
        self._context = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._push.setsockopt(zmq.RECONNECT_IVL, 50)
        self._push.connect(submit_endpoint)
        self._sub: zmq.Socket[bytes] | None = None
        if listen:
            self.listen()

    def listen(self, topic: str | None = None) -> None:
        """Connect and subscribe."""
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, self._receive_hwm)
        self._sub.setsockopt(zmq.RECONNECT_IVL, 50)
        self._sub.setsockopt(zmq.SUBSCRIBE, (self.topic if topic is None else topic).encode())
        self._sub.connect(self._publish_endpoint)

    def stop_listening(self) -> None:
        """Close the subscribing socket; what was on the way is lost."""
        assert self._sub is not None
        self._sub.close(linger=0)
        self._sub = None

    def send(self, message: Message) -> None:
        self.send_parts(encode(message))

    def send_parts(self, *parts: bytes) -> None:
        """Send anything at all."""
        assert self._push.poll(WAIT_S * 1000, zmq.POLLOUT), "the worker takes nothing"
        self._push.send_multipart(parts)

    def submit(self, prompt_ids: list[int], max_tokens: int, id: str = "") -> str:
        """Submit a prompt and return the request's id."""
        id = id or new_request_id()
        self.answers.setdefault(id, Answer())
        self.send(Submit(id, self.topic, prompt_ids, SamplingParams(), max_tokens))
        return id

    def cancel(self, id: str) -> None:
        self.send(Cancel(id))

    def resync(self) -> None:
        """Ask again for everything that follows what is here."""
        assert self.beat is not None
        have = [Have(id, len(answer.ids)) for id, answer in self.answers.items()]
        self.send(Resync(self.topic, self.beat.incarnation, have))

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
        """Receive until a condition holds; AssertionError when it does not in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, (
                f"{what} did not happen within {timeout_s} s; last heartbeat {self.beat}"
            )
            self.receive(0.05)

    def until_ended(self, *ids: str) -> None:
        """Receive until these requests have ended."""
        self.until(lambda: all(self.answers[id].ends for id in ids), "the end of the requests")

    def until_ready(self) -> None:
        """Receive until the worker says that it is ready."""
        self.until(lambda: self.beat is not None and self.beat.state == "ready", "a ready worker")

    def until_beat(self, **wanted: int) -> None:
        """Receive until a heartbeat shows these values, its own or of its counters."""

        def shown() -> bool:
            beat = self.beat
            return beat is not None and all(
                (beat.counters[name] if name in beat.counters else getattr(beat, name)) == value
                for name, value in wanted.items()
            )

        self.until(shown, f"a heartbeat with {wanted}")

    def until_idle(self) -> None:
        """Receive until the worker holds nothing."""
        self.until_beat(running=0, waiting=0, kv_blocks_used=0)

    def receive(self, timeout_s: float) -> None:
        """Take what is there, waiting for the first message."""
        if self._sub is None or not self._sub.poll(timeout_s * 1000):
            return
        while self._sub is not None and self._sub.poll(0):
            topic, data = self._sub.recv_multipart()
            assert topic.decode() == self.topic
            message = decode_to_web(data)
            if message.incarnation not in self.incarnations:
                self.incarnations.append(message.incarnation)
                self.seq = 0
            if isinstance(message, Heartbeat):
                self.beat = message
                self.states += [message.state] if self.states[-1:] != [message.state] else []
            else:
                self._take(message)

    def _take(self, batch: Batch) -> None:
        self.seq = batch.seq
        for event in batch.events:
            answer = self.answers[event.id]
            if isinstance(event, Accepted):
                answer.accepted += 1
            elif isinstance(event, Tokens):
                new = event.pos + len(event.ids) - len(answer.ids)
                answer.holes += max(0, event.pos - len(answer.ids))
                if event.pos <= len(answer.ids):
                    answer.repeated += len(event.ids) - max(0, new)
                    answer.ids += event.ids[len(event.ids) - new :] if new > 0 else []
            else:
                answer.ends.append(event)

    def close(self) -> None:
        self._context.destroy(linger=0)


def start_wire_client(submit_endpoint: str, publish_endpoint: str, max_tokens: int) -> subprocess.Popen[str]:
    """Start one request in a process of its own; the caller ends it."""
    command = [sys.executable, "-m", "tests.support.wire_client", submit_endpoint, publish_endpoint, str(max_tokens)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


PROMPT = [3, 4, 5]


def main() -> None:
    submit_endpoint, publish_endpoint, max_tokens = sys.argv[1:]
    client = WireClient(submit_endpoint, publish_endpoint)
    id = client.submit(PROMPT, int(max_tokens))
    answer = client.answers[id]
    client.until(lambda: answer.ids, "the first token")
    print("first", flush=True)
    client.until(lambda: answer.ends, "the end", timeout_s=60)
    print(json.dumps({"ids": answer.ids, "holes": answer.holes, "ends": len(answer.ends)}), flush=True)
    client.close()


if __name__ == "__main__":
    main()
