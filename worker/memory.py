"""How much a step may compute and how many cache blocks there can be, from the memory that is free after loading.

Runs once, in the thread that starts the worker.
"""

import logging
from pathlib import Path

import psutil
import torch

log = logging.getLogger(__name__)

CPU_BATCH_TOKENS = 256
"""On a CPU a step's time grows with its tokens, and every running request waits for it: short steps, steady tokens."""

CUDA_BATCH_TOKENS = 8192
CPU_SHARE = 0.5
"""Share of the free memory that the cache may take on a CPU, where other programs need some too."""

CUDA_SHARE = 0.9


def free_bytes(device: torch.device) -> int:
    """Return the memory that can still be taken on the device; on a CPU no more than the process's cgroup allows."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    free = int(psutil.virtual_memory().available)
    limit = _cgroup_free_bytes(Path("/sys/fs/cgroup"))
    return free if limit is None else min(free, limit)


def _cgroup_free_bytes(folder: Path) -> int | None:
    """Return what a container's memory limit leaves (cgroup version 2, seen from inside), None without a limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def choose_batch_tokens(device: torch.device, wanted: int | None) -> int:
    """Return max_batch_tokens: what was asked for, or what suits the device."""
    if wanted is not None:
        return wanted
    return CUDA_BATCH_TOKENS if device.type == "cuda" else CPU_BATCH_TOKENS


def choose_num_blocks(
    device: torch.device, wanted: int | None, block_bytes: int, step_bytes: int, most_blocks: int
) -> int:
    """Return num_blocks: what was asked for, or as many as fit beside a step, at most `most_blocks`.

    block_bytes: one block in all layers. step_bytes: what the largest step takes besides. most_blocks: what all the
    running requests could use. Returns 0 when not one block fits.
    """
    if wanted is not None:
        return wanted
    share = CUDA_SHARE if device.type == "cuda" else CPU_SHARE
    budget = int(free_bytes(device) * share) - step_bytes
    return max(0, min(most_blocks, budget // block_bytes))
