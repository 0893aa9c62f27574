"""Activation functions on the CPU whose bits do not depend on the batch.

torch computes exp, tanh and the like with vector instructions, but the elements left over at the end of each thread's
share with scalar ones, whose last bits differ. Which elements those are depends on the size of the whole tensor, that
is on who else is in the step. Here every share is a whole number of vectors.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2CLS

VECTOR = 64
"""Elements of a whole number of vectors: torch works on two at a time, of at most 16 float32."""

GRAIN = 32768
"""Elements that torch gives to a thread at least (at::internal::GRAIN_SIZE)."""

_CLASSES: list[Any] = [entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()]

ACTIVATIONS: tuple[type[nn.Module], ...] = (nn.GELU, *(cls for cls in _CLASSES if cls is not nn.PReLU))
"""The classes that transformers makes a model's activation from, those that take each element by itself."""


class AlignedActivation(nn.Module):
    """An element-wise function, computed on a padded copy where the shares would not come out whole."""

    def __init__(self, function: nn.Module):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return function(x), of x's shape."""
        size = x.numel()
        whole = aligned_size(size, torch.get_num_threads())
        flat = x.reshape(-1)
        if whole != size:
            flat = functional.pad(flat, (0, whole - size))
        y: torch.Tensor = self.function(flat)
        return y[:size].view(x.shape)


def aligned_size(size: int, num_threads: int) -> int:
    """Return the smallest size from `size` on that torch cuts into shares of whole vectors."""
    while True:
        shares = max(1, min(num_threads, -(-size // GRAIN)))
        whole = -(-size // (VECTOR * shares)) * VECTOR * shares
        if whole == size:
            return whole
        size = whole


def align_activations(model: nn.Module) -> int:
    """Replace the model's activation modules in place; return how many there were."""
    count = 0
    for parent in list(model.modules()):
        if isinstance(parent, AlignedActivation):
            continue
        for name, child in list(parent.named_children()):
            if isinstance(child, ACTIVATIONS):
                setattr(parent, name, AlignedActivation(child))
                count += 1
    return count
