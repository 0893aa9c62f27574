"""How much fits: memory and processors that this process may use, and from them the size of cache and step.

Runs in the thread that starts the worker, after the model is loaded. Allocates nothing.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import ConfigError

CPU_SHARE = 0.6
"""Part of the memory now available that the cache may take on the CPU, where other processes live too."""

CUDA_SHARE = 0.9
"""Part of the device memory now free that the cache may take; the rest is for activations."""

CPU_BATCH_TOKENS = 128
"""Tokens of a step on the CPU: more of them are no faster a token there, and every running request waits longer."""

CUDA_BATCH_TOKENS = 8192
"""Tokens of a step on CUDA, where long steps are what keeps the device busy."""

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Demand:
    """What one server could use at most: max_batch_size requests of max_model_len tokens each.

    step_bytes: scratch memory of the largest step.
    """

    max_batch_size: int
    max_model_len: int
    step_bytes: int = 0


def choose_num_blocks(
    wanted: int | None, bytes_per_token: int, block_size: int, demand: Demand, device: torch.device
) -> int:
    """Return the number of blocks: as wanted, or what free memory holds, but not more than demand can fill.

    Raises ConfigError when there is no memory for them (even for a single request when none are named).
    """
    block_bytes = bytes_per_token * block_size
    free = available_bytes(device) - demand.step_bytes
    if wanted is not None:
        if wanted * block_bytes > free:
            raise ConfigError(
                "num_blocks", f"{wanted} blocks take {_gib(wanted * block_bytes)}, but only {_gib(free)} are free"
            )
        return wanted
    share = CPU_SHARE if device.type == "cpu" else CUDA_SHARE
    fitting = int(free * share) // block_bytes
    useful = demand.max_batch_size * -(-demand.max_model_len // block_size)
    if fitting < 1:
        raise ConfigError("num_blocks", f"no memory for a single block: {_gib(free)} are free")
    return min(fitting, useful)


def choose_max_batch_tokens(wanted: int | None, max_batch_size: int, device: torch.device) -> int:
    """Return the tokens of one step at most: as wanted, or a step that keeps running requests' tokens coming."""
    if wanted is not None:
        return wanted
    return max(max_batch_size, CPU_BATCH_TOKENS if device.type == "cpu" else CUDA_BATCH_TOKENS)


def available_bytes(device: torch.device) -> int:
    """Return the free memory of a device; on the CPU within the limits of this process's control group."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    limits = [_meminfo_available(), _cgroup_v2_free(), _cgroup_v1_free()]
    return max(0, min(limit for limit in limits if limit is not None))


def usable_threads() -> int:
    """Return the processors this process may use, by its affinity and its control group's quota."""
    count = len(os.sched_getaffinity(0))
    quota = _read(CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        count = min(count, max(1, int(quota[0]) // int(quota[1])))
    return count


def _meminfo_available() -> int:
    for line in _read(MEMINFO).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_v2_free() -> int | None:
    return _free_within(CGROUP / "memory.max", CGROUP / "memory.current", CGROUP / "memory.stat", "inactive_file")


def _cgroup_v1_free() -> int | None:
    folder = CGROUP / "memory"
    return _free_within(
        folder / "memory.limit_in_bytes",
        folder / "memory.usage_in_bytes",
        folder / "memory.stat",
        "total_inactive_file",
    )


def _free_within(limit: Path, usage: Path, stat: Path, reclaimable: str) -> int | None:
    """Return a control group's limit less its usage; file pages that can be dropped do not count as used."""
    most, used = _read(limit).strip(), _read(usage).strip()
    if not most.isdigit() or not used.isdigit():
        return None
    lines = (line.split() for line in _read(stat).splitlines())
    droppable = next((int(value) for name, value in lines if name == reclaimable), 0)
    return int(most) - int(used) + droppable


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
