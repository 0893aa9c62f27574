"""Linear layers on the CPU: weights packed once at load for fast products whose bits do not depend on the batch.

`none`  float32. The product pads its rows to 16: below that the library takes other kernels with other last bits.
`fp16`  fbgemm's half-precision weights, float32 activations and sums: half the memory traffic, any number of rows.
`int8`  fbgemm's int8 weights (per output channel), int8 activations quantised row by row.

Used by the thread that loads the model. Knows nothing of models but their nn.Linear (and GPT-2's Conv1D) modules.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TypeGuard

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

MIN_ROWS = 16
"""Rows of a float32 product; below 12 its last bits were seen to depend on the number of rows."""

FP16_MAX = 65504.0
"""Largest number of half precision: a layer with a weight beyond it stays float32."""


class PackedLinear(nn.Module):
    """What stands in for a linear layer. `in_features` and `out_features` as in nn.Linear."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.out_features, self.in_features = weight.shape


class RowPaddedLinear(PackedLinear):
    """A float32 layer that always multiplies at least MIN_ROWS rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__(weight, bias)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias for x [..., in_features]."""
        flat = x.reshape(-1, self.in_features)
        rows = flat.shape[0]
        if rows < MIN_ROWS:
            flat = functional.pad(flat, (0, 0, 0, MIN_ROWS - rows))
        return functional.linear(flat, self.weight, self.bias)[:rows].view(*x.shape[:-1], self.out_features)


class Fp16Linear(PackedLinear):
    """Half-precision packed weights; activations, sums and bias in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__(weight, bias)
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias for float32 x [..., in_features]."""
        y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return y


class Int8Linear(PackedLinear):
    """Int8 weights with a scale per output channel, and activations quantised with a scale per row.

    The operator quantises its whole input with one scale. Rows are brought to the range [-1, 1] first and scaled back
    after, so that each has its own, and one request's outlier does not cost its neighbours their precision.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__(weight, bias)
        # Without VNNI the kernel adds pairs of products in 16 bits, which holds them only for 7-bit activations.
        self._levels, self._zero = (127, 128) if torch.cpu._is_vnni_supported() else (63, 64)
        scales = weight.abs().amax(1).clamp_(min=1e-12).double() / 127
        zeros = torch.zeros(self.out_features, dtype=torch.int64)
        quantised = torch.quantize_per_channel(weight.contiguous(), scales, zeros, 0, torch.qint8)
        self._packed = torch.ops.quantized.linear_prepack(quantised, None)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return about x @ weight.T + bias for float32 x [..., in_features]."""
        scale = x.abs().amax(-1, keepdim=True).clamp_(min=1e-12)
        y: torch.Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / scale, 1.0 / self._levels, self._zero, self._packed
        )
        y = y * scale
        return y if self.bias is None else y + self.bias


KINDS: dict[str, type[PackedLinear]] = {"none": RowPaddedLinear, "fp16": Fp16Linear, "int8": Int8Linear}


def packed(kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    """Return a layer of this kind for float32 weight [out_features, in_features], or a float32 one if it cannot be."""
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if kind != "none" and not largest <= FP16_MAX:  # true of NaN too
        kind = "none"
    return KINDS[kind](weight, bias)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module computes x @ weight.T + bias, or GPT-2's x @ weight + bias, and nothing else."""
    return type(module) is Conv1D or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)


def pack_linears(model: nn.Module, kind: str) -> Counter[str]:
    """Replace the model's linear layers in place by packed ones; return how many of each class there are.

    A weight that two modules share (a tied head) is packed for the linear layer, and the other module keeps its own
    copy. Layers with a forward of their own are left alone.
    """
    places = [
        (parent, name) for parent in model.modules() for name, child in parent.named_children() if is_linear(child)
    ]

    def replace(place: tuple[nn.Module, str]) -> str:
        # The layer is looked up here and held nowhere else, so that its float copy goes as soon as it is packed.
        parent, name = place
        layer = _pack(parent.get_submodule(name), kind)
        setattr(parent, name, layer)
        return type(layer).__name__

    # Packing a layer takes one thread, without the interpreter's lock.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return Counter(pool.map(replace, places))


def _pack(layer: nn.Module, kind: str) -> nn.Module:
    assert is_linear(layer)
    weight = layer.weight.detach().float()
    bias = None if layer.bias is None else layer.bias.detach().float()
    return packed(kind, weight.T.contiguous() if type(layer) is Conv1D else weight, bias)
