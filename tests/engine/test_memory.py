"""The size of cache and step from the memory and processors that this process may use."""

import pytest
import torch

from common.errors import ConfigError
from worker import memory
from worker.memory import Demand, available_bytes, choose_max_batch_tokens, choose_num_blocks, usable_threads

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 8 GiB available and no limits; returns a function that writes files of its control group."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {8 * GIB // 1024} kB\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    return write


def test_available_without_limits(machine):
    machine("memory.max", "max\n")
    machine("memory.current", "123\n")
    assert available_bytes(CPU) == 8 * GIB


def test_a_container_limit_counts_and_droppable_file_pages_do_not(machine):
    machine("memory.max", f"{4 * GIB}\n")
    machine("memory.current", f"{3 * GIB}\n")
    machine("memory.stat", f"anon 5\ninactive_file {GIB}\n")
    assert available_bytes(CPU) == 2 * GIB


def test_a_container_limit_of_version_1(machine):
    machine("memory/memory.limit_in_bytes", f"{2 * GIB}\n")
    machine("memory/memory.usage_in_bytes", f"{GIB}\n")
    assert available_bytes(CPU) == GIB


def test_a_limit_above_what_the_machine_has_changes_nothing(machine):
    machine("memory.max", f"{64 * GIB}\n")
    machine("memory.current", "0\n")
    assert available_bytes(CPU) == 8 * GIB


def test_blocks_are_what_fits_or_what_can_be_used(machine):
    """60 % of 8 GiB, unless all requests together cannot fill that."""
    assert choose_num_blocks(None, 1024, 32, Demand(64, 100_000), CPU) == int(8 * GIB * 0.6) // (32 * 1024)
    assert choose_num_blocks(None, 1024, 32, Demand(4, 100), CPU) == 4 * 4


def test_a_wanted_number_is_taken_if_there_is_memory_for_it(machine):
    assert choose_num_blocks(7, 1024, 32, Demand(4, 100), CPU) == 7
    with pytest.raises(ConfigError) as caught:
        choose_num_blocks(10**9, 1024, 32, Demand(4, 100), CPU)
    assert caught.value.key == "num_blocks"


def test_no_room_at_all_is_said_at_the_start(machine):
    with pytest.raises(ConfigError, match="num_blocks"):
        choose_num_blocks(None, 9 * GIB, 32, Demand(4, 100), CPU)
    with pytest.raises(ConfigError, match="num_blocks"):
        choose_num_blocks(None, 1024, 32, Demand(4, 100, step_bytes=9 * GIB), CPU)


def test_step_size_never_starves_the_running_requests():
    assert choose_max_batch_tokens(17, 64, CPU) == 17
    assert choose_max_batch_tokens(None, 64, CPU) == 128
    assert choose_max_batch_tokens(None, 500, CPU) == 500


def test_openmp_heed_the_processor_quota(machine, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert usable_threads() == 8
    machine("cpu.max", "max 100000\n")
    assert usable_threads() == 8
    machine("cpu.max", "250000 100000\n")
    assert usable_threads() == 2
    machine("cpu.max", "50000 100000\n")
    assert usable_threads() == 1
