"""A worker process without a model, for tests of the wire and of web: everything is real but the runner.

python -m tests.support.fake_worker --submit-endpoint ipc:///… --publish-endpoint ipc:///… [--step-delay-s 0.01] …
"""

import argparse
import os
import subprocess
import sys
import time
from typing import Any

from common.config import WorkerConfig, load
from common.errors import ConfigError
from common.wire import ModelInfo
from tests.support.fake_runner import EOS_TOKEN_ID, FakeRunner
from tests.support.processes import ROOT
from worker.engine import Engine
from worker.kv_cache import KVCacheManager
from worker.main import run_worker
from worker.scheduler import Scheduler, SchedulerConfig


def start_fake_worker(submit_endpoint: str, publish_endpoint: str, **settings: Any) -> subprocess.Popen[str]:
    """Start a worker process; settings are its flags by name. The caller ends it. Its stderr goes to a pipe."""
    command = [sys.executable, "-m", "tests.support.fake_worker"]
    for name, value in {"submit_endpoint": submit_endpoint, "publish_endpoint": publish_endpoint, **settings}.items():
        for item in value if isinstance(value, list) else [value]:
            command += [f"--{name.replace('_', '-')}", str(item)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("TOKENLOOM_")} | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--submit-endpoint")
    parser.add_argument("--publish-endpoint")
    parser.add_argument("--heartbeat-interval-s", type=float)
    parser.add_argument("--subscriber-grace-s", type=float)
    parser.add_argument("--stuck-limit-s", type=float)
    parser.add_argument("--max-queued-requests", type=int, default=1024)
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=100_000)
    parser.add_argument("--num-blocks", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--prefix-caching", type=int, default=0, help="1: share the blocks of equal prefixes")
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--step-delay-s", type=float, default=0.0, help="how long each step takes")
    parser.add_argument("--load-delay-s", type=float, default=0.0, help="how long the model takes to load")
    parser.add_argument("--raise-on", type=int, action="append", default=[], help="token id that makes a step raise")
    parser.add_argument("--model-id", default="fake")
    parser.add_argument("--model-path", default="/nonexistent", help="folder with tokenizer.json for web")
    return parser.parse_args()


def build(args: argparse.Namespace) -> tuple[Engine, ModelInfo]:
    """Return an engine with the fake runner, and what web is told about it."""
    time.sleep(args.load_delay_s)
    config = SchedulerConfig(
        max_batch_tokens=args.max_batch_tokens,
        max_batch_size=args.max_batch_size,
        max_queued_requests=args.max_queued_requests,
        max_model_len=args.max_model_len,
        vocab_size=args.vocab_size,
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
    )
    cache = KVCacheManager(args.num_blocks, args.block_size, bool(args.prefix_caching))
    engine = Engine(Scheduler(config, cache), FakeRunner(args.vocab_size, args.step_delay_s, frozenset(args.raise_on)))
    model = ModelInfo(args.model_id, args.model_path, engine.max_model_len, args.vocab_size, [EOS_TOKEN_ID])
    return engine, model


def main() -> int:
    args = parse()
    settings = {
        name: getattr(args, name)
        for name in (
            "submit_endpoint",
            "publish_endpoint",
            "heartbeat_interval_s",
            "subscriber_grace_s",
            "stuck_limit_s",
        )
    }
    try:
        return run_worker(load(WorkerConfig, settings), lambda config: build(args))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
