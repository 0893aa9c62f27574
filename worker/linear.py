"""Linear layers on the CPU: weights packed once at load for fast products whose bits do not depend on the batch.

`none`  float32, in products of exactly 16 or 64 rows: the library takes other kernels, with other last bits, for other
        numbers of rows, and which ones depends on the processor.
`fp16`  fbgemm's half-precision weights, float32 activations and sums: half the memory traffic, any number of rows.
`int8`  int8 weights (per output channel); activations quantised row by row, to 8 or 15 bits by the layer's part in the
        error. Layers of under a million weights stay fp16.

Used by the thread that loads the model. Knows nothing of models but their nn.Linear (and GPT-2's Conv1D) modules.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TypeGuard

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

TILE_ROWS = 16
"""Rows of a float32 product: with other numbers the last bits were seen to change, and in some rows only."""

LARGE_TILE_ROWS = 64
"""Rows of a float32 product of many rows, on processors where it was seen to give the same bits."""

FP16_MAX = 65504.0
"""Largest number of half precision: a layer with a weight beyond it stays float32."""

INT8_MIN_WEIGHTS = 2**20
"""Below it the steps around an int8 product cost more than the product saves."""

HAS_VNNI = torch.cpu._is_vnni_supported()
"""Whether the processor adds products of 8-bit numbers in 32 bits at once."""


class PackedLinear(nn.Module):
    """What stands in for a linear layer. `in_features` and `out_features` as in nn.Linear."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.out_features, self.in_features = weight.shape


class TiledLinear(PackedLinear):
    """A float32 layer that multiplies TILE_ROWS or LARGE_TILE_ROWS rows at a time, padded with zeros."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__(weight, bias)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias for x [..., in_features]."""
        flat = x.reshape(-1, self.in_features)
        rows = len(flat)
        large = LARGE_TILE_ROWS if rows > TILE_ROWS and large_tiles_agree(self.weight) else TILE_ROWS
        whole = rows - rows % large
        tiles = list(flat[:whole].split(large)) if whole else []
        if rest := rows - whole:
            tile = TILE_ROWS if rest <= large // 2 else large
            tiles += functional.pad(flat[whole:], (0, 0, 0, -rest % tile)).split(tile)
        y = _joined([functional.linear(tile, self.weight, self.bias) for tile in tiles or [flat]])
        return y[:rows].view(*x.shape[:-1], self.out_features)


def _joined(products: list[torch.Tensor]) -> torch.Tensor:
    """Return them one below the other; copying the only one would cost time."""
    return products[0] if len(products) == 1 else torch.cat(products)


_LARGE_TILES_AGREE: dict[torch.Size, bool] = {}


def large_tiles_agree(weight: torch.Tensor) -> bool:
    """Return whether each row of a large product has the bits it has in a small one, tried once for a weight's shape.

    Call it from the thread that multiplies: the number of threads decides which kernels are taken.
    """
    if weight.shape not in _LARGE_TILES_AGREE:
        x = torch.randn(LARGE_TILE_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
        small = torch.cat([functional.linear(tile, weight) for tile in x.split(TILE_ROWS)])
        _LARGE_TILES_AGREE[weight.shape] = torch.equal(functional.linear(x, weight), small)
    return _LARGE_TILES_AGREE[weight.shape]


class Fp16Linear(PackedLinear):
    """Half-precision packed weights; activations, sums and bias in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__(weight, bias)
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias for float32 x [..., in_features]."""
        y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return y


class OnednnProduct:
    """Products of quantised activations with int8 weights, by oneDNN: the faster one where there is VNNI."""

    LEVELS = 127

    def __init__(self, levels: torch.Tensor, steps: torch.Tensor):
        """Take int8 levels [out_features, in_features] and the step [out_features] between two of them."""
        self._packed = torch.ops.onednn.qlinear_prepack(levels, None)
        self._steps = steps / self.LEVELS
        self._zeros = torch.zeros(len(steps), dtype=torch.int64)
        self._middle = torch.tensor(self.LEVELS + 1.5)  # conversion to integers cuts off: a half more rounds

    def one_term(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the product [rows, out_features] of x / scale rounded to 8 bits; scale is [rows, 1]."""
        return self._multiply(torch.addcdiv(self._middle, x, scale, value=self.LEVELS).to(torch.uint8))

    def two_terms(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the product [rows, out_features] of x / scale rounded to 15 bits."""
        rows = len(x)
        terms = torch.empty(2 * rows, x.shape[1], dtype=torch.uint8)
        levels = torch.addcdiv(self._middle, x, scale, value=self.LEVELS)
        terms[:rows] = levels
        terms[rows:] = levels.frac_().mul_(2 * self.LEVELS).add_(1.5)  # what is left is [-1/2, 1/2], plus a half
        y = self._multiply(terms)
        return y[:rows].add_(y[rows:], alpha=0.5 / self.LEVELS)

    def _multiply(self, levels: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            levels,
            1.0,
            self.LEVELS + 1,
            self._packed,
            self._steps,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return y


class FbgemmProduct:
    """The same by fbgemm, for processors without VNNI, where oneDNN is slow."""

    LEVELS = 63
    """Pairs of products are added in 16 bits first, which holds them only for 7-bit activations."""

    def __init__(self, levels: torch.Tensor, steps: torch.Tensor):
        zeros = torch.zeros(len(steps), dtype=torch.int64)
        weight = torch._make_per_channel_quantized_tensor(levels, steps.double() / self.LEVELS, zeros, 0)
        self._packed = torch.ops.quantized.linear_prepack(weight, None)

    def one_term(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the product [rows, out_features] of x / scale rounded to 7 bits; scale is [rows, 1]."""
        return self._multiply(torch.div(x, scale).mul_(self.LEVELS))

    def two_terms(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the product [rows, out_features] of x / scale rounded to 13 bits."""
        rows = len(x)
        terms = x.new_empty(2 * rows, x.shape[1])
        levels = torch.div(x, scale).mul_(self.LEVELS)
        torch.round(levels, out=terms[:rows])
        torch.sub(levels, terms[:rows], out=terms[rows:]).mul_(2 * self.LEVELS)
        y = self._multiply(terms)
        return y[:rows].add_(y[rows:], alpha=0.5 / self.LEVELS)

    def _multiply(self, levels: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            levels, 1.0, self.LEVELS + 1, self._packed
        )
        return y


class Int8Linear(PackedLinear):
    """Int8 weights with a scale per output channel; activations in one or two 8-bit terms with a scale per row.

    The second term holds what the first rounded away; both are rows of one product. Each row has a scale of its own, so
    that one request's outlier does not cost its neighbours their precision. Sums are exact integers.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        terms: int,
        product: type[OnednnProduct] | type[FbgemmProduct],
    ):
        super().__init__(weight, bias)
        self.terms = terms
        steps = weight.abs().amax(1, keepdim=True).clamp_(min=1e-12) / 127
        made = product((weight / steps).round_().to(torch.int8), steps[:, 0])
        self._product = made.one_term if terms == 1 else made.two_terms
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return about x @ weight.T + bias for float32 x [..., in_features]."""
        flat = x.reshape(-1, self.in_features)
        scale = flat.abs().amax(-1, keepdim=True).clamp_(min=1e-12)
        y = self._product(flat, scale)
        y = y.mul_(scale) if self.bias is None else torch.addcmul(self.bias, y, scale)
        return y.view(*x.shape[:-1], self.out_features)


def can_pack() -> bool:
    """Return whether torch can pack weights on this processor (fbgemm needs an x86 one); `none` works everywhere."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def packed(
    kind: str,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_head: bool = False,
    int8_min_weights: int = INT8_MIN_WEIGHTS,
) -> nn.Module:
    """Return a layer of this kind for float32 weight [out_features, in_features], or a more exact one.

    Float32 where half precision cannot hold a weight. For int8, layers of fewer weights stay fp16, and one term is
    for the layers that widen (the first of an MLP): they are most of the work and least of the error. What feeds the
    residual stream, and the head, take two, and so does everything where a term has but 7 bits.
    """
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if kind == "none" or not largest <= FP16_MAX:  # true of NaN too
        return TiledLinear(weight, bias)
    if kind == "fp16" or weight.numel() < int8_min_weights:
        return Fp16Linear(weight, bias)
    if not HAS_VNNI:
        return Int8Linear(weight, bias, 2, FbgemmProduct)
    widens = weight.shape[0] >= 2 * weight.shape[1] and not is_head
    return Int8Linear(weight, bias, 1 if widens else 2, OnednnProduct)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module computes x @ weight.T + bias, or GPT-2's x @ weight + bias, and nothing else."""
    return type(module) is Conv1D or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)


def pack_linears(model: nn.Module, kind: str, int8_min_weights: int = INT8_MIN_WEIGHTS) -> Counter[str]:
    """Replace the model's linear layers in place by packed ones; return how many of each class there are.

    A weight that two modules share (a tied head) is packed for the linear layer, and the other module keeps its own
    copy. Layers with a forward of their own are left alone.
    """
    places = [
        (parent, name) for parent in model.modules() for name, child in parent.named_children() if is_linear(child)
    ]

    head = id(model.get_output_embeddings()) if isinstance(model, PreTrainedModel) else None

    def replace(place: tuple[nn.Module, str]) -> str:
        # The layer is looked up here and held nowhere else, so that its float copy goes as soon as it is packed.
        parent, name = place
        layer = _pack(parent.get_submodule(name), kind, head, int8_min_weights)
        setattr(parent, name, layer)
        return type(layer).__name__

    # Packing a layer takes one thread, without the interpreter's lock.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return Counter(pool.map(replace, places))


def _pack(layer: nn.Module, kind: str, head: int | None, int8_min_weights: int) -> nn.Module:
    assert is_linear(layer)
    weight = layer.weight.detach().float()
    bias = None if layer.bias is None else layer.bias.detach().float()
    rows = weight.T.contiguous() if type(layer) is Conv1D else weight
    return packed(kind, rows, bias, id(layer) == head, int8_min_weights)
