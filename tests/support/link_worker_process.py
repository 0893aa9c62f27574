"""Interim worker process for the link's tests."""

import argparse
import os
import time

import zmq

from common.ids import new_incarnation
from common.wire import *  # noqa: F403
from common.wire import Accepted, Batch, Cancel, Failed, Finished, Heartbeat, ModelInfo, Resync, Submit, Tokens
from common.wire import decode_to_worker, encode
from tests.support.history_runner import HistoryRunner
from worker.engine import Engine
from worker.kv_cache import KVCacheManager
from worker.scheduler import Scheduler, SchedulerConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--max-batch-size", type=int, default=256)
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--num-blocks", type=int, default=20000)
    args = parser.parse_args()
    scheduler = Scheduler(
        SchedulerConfig(args.max_batch_tokens, args.max_batch_size, 4096, 100_000, 1000),
        KVCacheManager(args.num_blocks, 16, False),
    )
    runner = HistoryRunner(args.num_blocks, 16)
    runner._verify = lambda batch, segment: None
    engine = Engine(scheduler, runner)
    ctx = zmq.Context()
    pull, pub = ctx.socket(zmq.PULL), ctx.socket(zmq.XPUB)
    for e in ("SUBMIT", "PUBLISH"):
        path = os.environ[f"TOKENLOOM_{e}_ENDPOINT"]
        if os.path.exists(path[6:]):
            os.unlink(path[6:])
    pub.setsockopt(zmq.XPUB_NODROP, 1)
    pull.bind(os.environ["TOKENLOOM_SUBMIT_ENDPOINT"])
    pub.bind(os.environ["TOKENLOOM_PUBLISH_ENDPOINT"])
    inc, beat = new_incarnation(), 0.0
    topics: dict[str, list] = {}
    owner: dict[str, str] = {}
    history: dict[str, list] = {}
    seqs: dict[str, int] = {}
    pending: dict[str, list] = {}
    model = ModelInfo("fake", "/models/fake", 100_000, 1000)

    def flush(topic):
        if topic in topics and pending.get(topic):
            try:
                pub.send_multipart([topic.encode(), encode(Batch(inc, seqs[topic] + 1, pending[topic]))], zmq.NOBLOCK)
            except zmq.Again:
                return
            seqs[topic] += 1
            pending[topic] = []

    while True:
        pull.poll(0 if engine.has_work else 20)
        while pub.poll(0):
            frame = pub.recv()
            topic = frame[1:].decode()
            if frame[0]:
                topics[topic] = []
                seqs.setdefault(topic, 0)
            else:
                topics.pop(topic, None)
                for rid, t in list(owner.items()):
                    if t == topic:
                        engine.cancel(rid)
        while pull.poll(0):
            m = decode_to_worker(pull.recv())
            if isinstance(m, Submit):
                if m.id not in owner:
                    owner[m.id] = m.topic
                    engine.add(m)
                else:
                    pending.setdefault(m.topic, []).extend(
                        [
                            Accepted(m.id),
                            Tokens(m.id, 0, [t for e in history[m.id] if isinstance(e, Tokens) for t in e.ids]),
                        ]
                        + [e for e in history[m.id] if isinstance(e, (Finished, Failed))]
                    )
            elif isinstance(m, Cancel):
                engine.cancel(m.id)
            elif isinstance(m, Resync) and m.incarnation == inc:
                for have in m.requests:
                    ids = [t for e in history[have.id] if isinstance(e, Tokens) for t in e.ids]
                    pending.setdefault(m.topic, []).extend(
                        [Accepted(have.id), Tokens(have.id, have.have, ids[have.have :])]
                        + [e for e in history[have.id] if isinstance(e, (Finished, Failed))]
                    )
        if engine.has_work:
            started = time.monotonic()
            engine.step()
            runner.steps.clear()
            time.sleep(max(0.0, args.step_s - (time.monotonic() - started)))
        for event in engine.take_events():
            history.setdefault(event.id, []).append(event)
            pending.setdefault(owner[event.id], []).append(event)
        for topic in list(pending):
            seqs.setdefault(topic, 0)
            flush(topic)
        if time.monotonic() - beat > 0.1:
            beat = time.monotonic()
            s = engine.stats
            for topic in topics:
                try:
                    pub.send_multipart(
                        [
                            topic.encode(),
                            encode(
                                Heartbeat(
                                    inc,
                                    "ready",
                                    seqs[topic],
                                    model,
                                    s.step,
                                    0.0,
                                    s.running,
                                    s.waiting,
                                    s.kv_blocks_used,
                                    s.kv_blocks_total,
                                )
                            ),
                        ],
                        zmq.NOBLOCK,
                    )
                except zmq.Again:
                    pass


if __name__ == "__main__":
    main()
