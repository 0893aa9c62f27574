"""Linear layers packed for the CPU: weights are laid out once at load for fast kernels, and the float copy is freed.

Every mode is batch-invariant on the CPU: the bits of a row's result do not depend on how many rows there are.

none    float32. MKL's products differ in the last bit below 12 rows, so fewer are padded to 16.
fp16    fbgemm's packed float16 weights, float32 activations and sums; 4 to 7 times float32 at 1 to 16 rows.
int8    weights int8 per output channel, activations int8 per row, sums int32.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn.functional import linear, pad
from transformers.pytorch_utils import Conv1D

MIN_ROWS = 16
FP16_MAX = 65504.0
INT8_ZERO_POINT = 128


class PaddedLinear(torch.nn.Module):
    """A float linear layer whose small inputs are padded with zero rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., in] → [..., out]."""
        rows = x.reshape(-1, x.shape[-1])
        missing = MIN_ROWS - rows.shape[0]
        y = (
            linear(pad(rows, (0, 0, 0, missing)), self.weight, self.bias)[:-missing]
            if missing > 0
            else linear(rows, self.weight, self.bias)
        )
        return y.view(*x.shape[:-1], -1)


class Fp16Linear(torch.nn.Module):
    """fbgemm's packed float16 weights with float32 activations."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 x [..., in] → [..., out]."""
        y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x.reshape(-1, x.shape[-1]), self._packed)
        return y.view(*x.shape[:-1], -1)


class Int8Linear(torch.nn.Module):
    """int8 weights, one scale per output channel; activations quantised with one scale per row.

    The operator knows one activation scale for all rows, so each row is first brought to [-1, 1]. One outlier then
    costs its own row precision, and no other. Without VNNI the kernels add pairs in 16 bits, so 7 bits must do.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self._levels = 127 if torch.cpu._is_vnni_supported() else 63
        scales = (weight.abs().amax(1) / 127).clamp_(min=1e-12)
        zeros = torch.zeros(len(scales), dtype=torch.int64)
        packed = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self._packed = torch.ops.quantized.linear_prepack(packed, None)
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 x [..., in] → [..., out]."""
        rows = x.reshape(-1, x.shape[-1])
        size = rows.abs().amax(1, keepdim=True).clamp_(min=1e-12)
        y: torch.Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows / size, 1.0 / self._levels, INT8_ZERO_POINT, self._packed
        )
        y = y.mul_(size)
        if self._bias is not None:
            y += self._bias
        return y.view(*x.shape[:-1], -1)


Packer = Callable[[torch.Tensor, torch.Tensor | None], torch.nn.Module]

PACKERS: dict[str, Packer] = {"none": PaddedLinear, "fp16": Fp16Linear, "int8": Int8Linear}
"""What replaces a float layer in each mode, given its weight [out, in] and bias [out] or None."""


def pack_linear_layers(model: torch.nn.Module, mode: str) -> None:
    """Replace every linear layer of a float32 model on the CPU. `mode` is a key of PACKERS."""
    places = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, (torch.nn.Linear, Conv1D))
    ]

    def replace(place: tuple[torch.nn.Module, str]) -> None:
        # Looked up here and not held anywhere else, so that each float copy is freed as soon as it is packed.
        module, name = place
        setattr(module, name, _pack(getattr(module, name), mode))

    # Packing runs on one thread per layer and lets go of the interpreter lock.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(replace, places))


def _pack(layer: torch.nn.Linear | Conv1D, mode: str) -> torch.nn.Module:
    weight = layer.weight.detach()
    if isinstance(layer, Conv1D):  # GPT-2 keeps its weights transposed
        weight = weight.t().contiguous()
    bias = None if layer.bias is None else layer.bias.detach()
    if mode == "fp16" and weight.abs().max() > FP16_MAX:
        mode = "none"
    return PACKERS[mode](weight, bias)
