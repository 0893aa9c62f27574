"""Puts the engine together: model, cache, scheduler, runner.

Runs in the thread that starts the worker.
"""

from collections.abc import Callable

import torch

from common.config import WorkerConfig
from common.errors import ConfigError
from common.wire import ModelInfo
from worker.engine import Engine
from worker.kv_cache import KVCacheManager
from worker.memory import Demand, choose_max_batch_tokens, choose_num_blocks, usable_threads
from worker.model_loader import LoadedModel, load_model
from worker.models.resolve import ResolvedModel
from worker.probe import measure_step, probe
from worker.runner import TorchRunner
from worker.scheduler import Scheduler, SchedulerConfig


def build_engine(
    config: WorkerConfig, resolved: ResolvedModel, report: Callable[[str], None]
) -> tuple[Engine, ModelInfo]:
    """Load the model and build the engine for it.

    `report` takes lines for the log. Raises ConfigError for settings that do not work here and ModelError for a model
    that does not.
    """
    torch.set_num_threads(config.threads or usable_threads())
    report(f"loading {resolved.path}")
    loaded = load_model(resolved.path, config, report)
    device = loaded.model.device
    bytes_per_token = probe(loaded, config.block_size)
    max_model_len = choose_max_model_len(config.max_model_len, loaded.max_model_len)
    max_batch_size = config.max_batch_size if config.continuous_batching else 1
    max_batch_tokens = choose_max_batch_tokens(config.max_batch_tokens, max_batch_size, device)
    step_bytes = measure_step(loaded, min(max_batch_tokens, max_model_len), config.block_size)
    demand = Demand(max_batch_size, max_model_len, step_bytes)
    num_blocks = choose_num_blocks(config.num_blocks, bytes_per_token, config.block_size, demand, device)
    check_cache_size(num_blocks * config.block_size, config.max_model_len)
    scheduler_config = SchedulerConfig(
        max_batch_tokens=max_batch_tokens,
        max_batch_size=max_batch_size,
        max_queued_requests=config.max_queued_requests,
        max_model_len=max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=frozenset(loaded.eos_token_ids),
    )
    scheduler = Scheduler(scheduler_config, KVCacheManager(num_blocks, config.block_size, config.prefix_caching))
    runner = TorchRunner(loaded.model, num_blocks, config.block_size)
    report(
        f"{num_blocks} cache blocks of {config.block_size} tokens ({bytes_per_token} bytes a token), "
        f"{scheduler_config.max_batch_tokens} tokens a step at most, context {scheduler.max_model_len}"
    )
    return Engine(scheduler, runner), describe(loaded, config, resolved, scheduler, device)


def choose_max_model_len(wanted: int | None, own: int) -> int:
    """Return the context length in tokens. Raises ConfigError for more than the model's own."""
    if wanted is not None and wanted > own:
        raise ConfigError("max_model_len", f"{wanted} is beyond the model's own {own} tokens")
    return wanted or own


def check_cache_size(cache_tokens: int, wanted_model_len: int | None) -> None:
    """Raise ConfigError for a cache that holds no request at all, or none of the length that was asked for."""
    if cache_tokens < 2:
        raise ConfigError("num_blocks", "a prompt token and an answer token need room for two")
    if wanted_model_len is not None and cache_tokens < wanted_model_len:
        raise ConfigError("max_model_len", f"{wanted_model_len} tokens do not fit into a cache of {cache_tokens}")


def describe(
    loaded: LoadedModel, config: WorkerConfig, resolved: ResolvedModel, scheduler: Scheduler, device: torch.device
) -> ModelInfo:
    """Return what the web side learns of the model."""
    return ModelInfo(
        id=resolved.id,
        path=str(resolved.path.resolve()),
        max_model_len=scheduler.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=list(loaded.eos_token_ids),
        details={
            "device": str(device),
            "dtype": loaded.dtype,
            "quantization": loaded.quantization,
            **{f"perplexity_{kind}": value for kind, value in loaded.perplexity.items()},
            "attn_implementation": loaded.attention,
            "block_size": config.block_size,
            "num_blocks": scheduler.cache.num_blocks,
            "max_batch_tokens": scheduler.config.max_batch_tokens,
            "max_batch_size": scheduler.config.max_batch_size,
        },
    )
