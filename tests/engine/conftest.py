"""Engine tests run tiny models: one thread is quickest for them. Those about bits ask for more."""

import os
from collections.abc import Iterator

import pytest

from worker.openmp import spin_briefly

spin_briefly(os.environ)  # before torch is imported: two threads crawl when another program wants a core, too

import torch  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads(one_thread: None) -> None:
    torch.set_num_threads(2)
