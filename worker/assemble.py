"""Puts an engine together: model, cache, scheduler, in the sizes that the machine's memory allows.

Runs once, in the thread that starts the worker.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from common.config import WorkerConfig
from common.errors import ConfigError, ModelError
from common.params import SamplingParams
from common.wire import ModelInfo
from worker.batch import Scheduled, build_batch
from worker.engine import Engine
from worker.kv_cache import KVCacheManager
from worker.memory import choose_batch_tokens, choose_num_blocks
from worker.model_loader import LoadedModel, load_model
from worker.request import RequestState
from worker.runner import TorchRunner
from worker.scheduler import Scheduler, SchedulerConfig


def build_engine(config: WorkerConfig, model_dir: Path, report: Callable[[str], None]) -> tuple[Engine, ModelInfo]:
    """Load the model in `model_dir` and return an engine for it, and what the web tier must know of it.

    Raises ConfigError or ModelError when it cannot be served here.
    """
    loaded = load_model(model_dir, config, report)
    max_model_len = _max_model_len(config, loaded)
    batch_tokens = choose_batch_tokens(loaded.placement.device, config.max_batch_tokens)
    report("warming up")
    bytes_per_token, step_bytes = _profile(loaded, min(batch_tokens, max_model_len), config.block_size)
    num_blocks = _num_blocks(config, loaded, max_model_len, bytes_per_token * config.block_size, step_bytes)
    scheduler = Scheduler(
        SchedulerConfig(
            max_batch_tokens=batch_tokens,
            max_batch_size=min(config.max_batch_size, batch_tokens) if config.continuous_batching else 1,
            max_queued_requests=config.max_queued_requests,
            max_model_len=max_model_len,
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
        ),
        KVCacheManager(num_blocks, config.block_size, config.prefix_caching),
    )
    engine = Engine(scheduler, TorchRunner(loaded.model, num_blocks, config.block_size))
    details = {
        "device": str(loaded.placement.device),
        "dtype": str(loaded.placement.dtype).removeprefix("torch."),
        "quantization": loaded.placement.quantization,
        "attention": loaded.placement.attention,
        "block_size": config.block_size,
        "num_blocks": num_blocks,
        "max_batch_tokens": scheduler.config.max_batch_tokens,
        "max_batch_size": scheduler.config.max_batch_size,
    }
    report(", ".join(f"{name} {value}" for name, value in details.items()))
    info = ModelInfo(
        id=config.served_model_name or model_dir.name,
        path=str(model_dir.resolve()),
        max_model_len=engine.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=sorted(loaded.eos_token_ids),
        details=details,
    )
    return engine, info


def _max_model_len(config: WorkerConfig, loaded: LoadedModel) -> int:
    if config.max_model_len is None:
        return loaded.max_model_len
    if config.max_model_len > loaded.max_model_len:
        raise ConfigError("max_model_len", f"the model's own limit is {loaded.max_model_len} tokens")
    return config.max_model_len


def _num_blocks(
    config: WorkerConfig, loaded: LoadedModel, max_model_len: int, block_bytes: int, step_bytes: int
) -> int:
    most = config.max_batch_size * -(-max_model_len // config.block_size)
    num_blocks = choose_num_blocks(loaded.placement.device, config.num_blocks, block_bytes, step_bytes, most)
    if num_blocks * config.block_size < 2:
        raise ConfigError("num_blocks", f"there is no room for a cache: a block takes {block_bytes:,} bytes")
    return num_blocks


def _profile(loaded: LoadedModel, num_tokens: int, block_size: int) -> tuple[int, int]:
    """Run one step of `num_tokens` tokens; return the cache bytes per token and the bytes that the step took besides.

    It also warms up, and proves that every layer of the model reads and writes the paged cache.
    """
    device = loaded.placement.device
    num_blocks = -(-num_tokens // block_size)
    runner = TorchRunner(loaded.model, num_blocks, block_size)
    request = RequestState("warm-up", [0] * num_tokens, num_tokens, SamplingParams(), max_tokens=1)
    request.block_table = list(range(num_blocks))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    runner.run(build_batch([Scheduled(request, num_tokens)], block_size))
    layers = loaded.model.config.get_text_config(decoder=True).num_hidden_layers
    if runner.kv_cache.num_layers != layers:
        raise ModelError(
            f"{runner.kv_cache.num_layers} of the model's {layers} layers use the paged cache; "
            "models with other kinds of layers cannot be served"
        )
    bytes_per_token = runner.kv_cache.bytes_per_token
    if device.type != "cuda":
        return bytes_per_token, 0  # already taken by the process, or returned to the system
    return bytes_per_token, torch.cuda.max_memory_allocated(device) - before - bytes_per_token * num_tokens
