"""Packed linear layers: close to float32, the same bits for a row in any batch, nothing overflows."""

import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from worker import linear
from worker.activation import GRAIN, VECTOR, AlignedActivation, align_activations, aligned_size
from worker.linear import FbgemmProduct, Fp16Linear, Int8Linear, OnednnProduct, TiledLinear, pack_linears, packed

TOLERANCE = {"none": 1e-5, "fp16": 2e-3, "int8 two onednn": 5e-2, "int8 two fbgemm": 5e-2, "int8 one fbgemm": 0.1}
"""Largest error allowed, in standard deviations of the exact result; the weights' part of it is 4e-2 in int8."""

if linear.HAS_VNNI:  # elsewhere its sums of 8-bit activations overflow, and it is not used
    TOLERANCE["int8 one onednn"] = 8e-2

KINDS = tuple(TOLERANCE)
INT8 = KINDS[2:]


def layer(kind: str, rows: int, columns: int, bias: bool = True) -> tuple[nn.Module, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(rows * columns)
    weight, offset = torch.randn(rows, columns) * 0.05, torch.randn(rows) if bias else None
    return made_of(kind, weight.clone(), offset), weight, offset


def made_of(kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    if kind.startswith("int8"):
        _, terms, library = kind.split()
        product = FbgemmProduct if library == "fbgemm" else OnednnProduct
        return Int8Linear(weight, bias, 1 if terms == "one" else 2, product)
    return packed(kind, weight, bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(96, 64), (97, 33), (640, 1024)])
def test_close_to_exact(kind, bias, shape):
    made, weight, offset = layer(kind, *shape, bias)
    x = torch.randn(3, 7, shape[1])
    exact = functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    found = made(x)
    assert found.dtype == torch.float32
    assert found.shape == exact.shape
    assert (found - exact).abs().max() / exact.std() < TOLERANCE[kind]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(896, 896), (4864, 896), (896, 4864), (97, 33), (15193, 896)])
def test_bits_of_a_row_do_not_depend_on_the_batch(kind, shape):
    """Any number of rows, any place among them."""
    made, _, _ = layer(kind, *shape)
    x = torch.randn(140, shape[1])
    whole = made(x)
    for rows in (1, 2, 3, 7, 12, 15, 16, 17, 31, 33, 64, 65, 127):
        for first in (0, 5):
            assert torch.equal(made(x[first : first + rows][None])[0], whole[first : first + rows]), rows


def test_bits_hold_with_other_kernels_too():
    """Intel's library picks kernels by processor; its mode for any processor stands in for those not at hand."""
    kernels = os.environ | {"MKL_CBWR": "COMPATIBLE"}
    test = f"{__file__}::{test_bits_of_a_row_do_not_depend_on_the_batch.__name__}"
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", test, "-k", "none"], env=kernels, capture_output=True)
    assert run.returncode == 0, run.stdout.decode()


@pytest.mark.parametrize("agree", [True, False])
def test_large_tiles_serve_only_where_they_agree(agree, monkeypatch):
    made, weight, offset = layer("none", 8, 4)
    monkeypatch.setattr(linear, "large_tiles_agree", lambda weight: agree)
    sizes = []
    monkeypatch.setattr(linear.functional, "linear", lambda x, *rest: sizes.append(len(x)) or x @ rest[0].T + rest[1])
    for rows in (0, 1, 16, 17, 48, 64, 65, 130):
        x = torch.randn(rows, 4)
        assert torch.allclose(made(x), x @ weight.T + offset)
    small, large = linear.TILE_ROWS, linear.LARGE_TILE_ROWS
    assert sizes.count(large) == (5 if agree else 0)
    assert set(sizes) - {0} == ({small, large} if agree else {small})


@pytest.mark.parametrize("kind", INT8)
def test_an_outlier_costs_its_own_row_alone(kind):
    """Per-tensor int8 would spoil every neighbour of a request with one large activation."""
    made, _, _ = layer(kind, 64, 64)
    x = torch.randn(4, 64)
    alone = made(x[:1])
    x[2, 5] = 1e4
    assert torch.equal(made(x)[:1], alone)


@pytest.mark.parametrize("kind", INT8)
def test_int8_does_not_overflow_at_the_ends_of_its_range(kind):
    """All products of one sign at full scale, where 16-bit sums of a processor without VNNI would clip."""
    weight = torch.full((32, 256), 0.5)
    found = made_of(kind, weight, None)(torch.cat([torch.full((1, 256), 3.0), torch.full((1, 256), -3.0)]))
    assert torch.allclose(found, torch.tensor([[384.0], [-384.0]]).expand(2, 32), rtol=0.02)


@pytest.mark.parametrize("kind", [kind for kind in INT8 if "two" in kind])
def test_two_terms_keep_15_or_13_bits_of_an_activation(kind):
    """Weights that int8 holds exactly leave the error of the activations alone; one term makes 30 times as much."""
    weight = torch.randint(-127, 128, (64, 512)).float()
    weight[:, 0] = 127
    x = torch.randn(20, 512)
    x[:, 7] = 40.0
    exact = functional.linear(x.double(), weight.double())
    assert float((made_of(kind, weight, None)(x) - exact).std() / exact.std()) < 1e-3


def test_where_int8_goes():
    """In one term only for what widens; the head and what narrows in two; small layers and odd weights stay exact."""

    def terms(rows: int, columns: int, is_head: bool = False) -> int:
        return packed("int8", torch.randn(rows, columns), None, is_head, int8_min_weights=0).terms

    assert terms(512, 256) == (1 if linear.HAS_VNNI else 2)
    assert [terms(511, 256), terms(256, 512), terms(512, 256, is_head=True)] == [2, 2, 2]


def test_small_layers_stay_fp16():
    for columns, cls in ((63, Fp16Linear), (64, Int8Linear)):
        assert isinstance(packed("int8", torch.randn(64, columns), None, int8_min_weights=64 * 64), cls)


def test_a_row_of_zeros():
    for kind in KINDS:
        made, _, offset = layer(kind, 32, 16)
        assert torch.equal(made(torch.zeros(2, 16)), offset.expand(2, 32))


@pytest.mark.parametrize("value", [70_000.0, -70_000.0, float("inf"), float("nan")])
@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_weights_out_of_range_stay_float32(kind, value):
    """65504 is the largest half-precision number; fbgemm would clip beyond it without a word."""
    weight = torch.randn(8, 8)
    weight[3, 4] = value
    assert isinstance(packed(kind, weight, None), TiledLinear)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.inner = nn.Sequential(nn.Linear(16, 16), Conv1D(16, 16))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding(ids)))


@pytest.mark.parametrize(
    ("kind", "cls", "tolerance"),
    [("none", TiledLinear, 1e-4), ("fp16", Fp16Linear, 2e-2), ("int8", Int8Linear, 0.6)],
)
def test_every_linear_layer_is_packed_and_a_tied_embedding_lives_on(kind, cls, tolerance):
    """GPT-2's transposed layers too; the head's packing must not touch the embedding that shares its weight."""
    torch.manual_seed(0)
    model = Tied()
    ids, embedding = torch.arange(50), model.embedding.weight.detach().clone()
    with torch.no_grad():
        before = model(ids)
        assert pack_linears(model, kind, int8_min_weights=0) == {cls.__name__: 3}
        after = model(ids)
    assert torch.equal(model.embedding.weight, embedding)
    assert (after - before).abs().max() / before.std() < tolerance


def test_float_copies_are_freed():
    """At its end packing must not hold the weights twice."""
    model = nn.Sequential(nn.Linear(16, 16))
    copy = weakref.ref(model[0].weight)
    pack_linears(model, "fp16")
    gc.collect()
    assert copy() is None


def test_layers_with_a_forward_of_their_own_are_left_alone():
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Doubled(4, 4))
    assert not pack_linears(model, "fp16")
    assert type(model[0]) is Doubled


# --- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 16, 64])
def test_aligned_sizes_are_cut_into_whole_vectors(threads):
    """Whatever torch's number of shares for a size is, each begins and ends between two vectors."""
    for size in [1, 63, 64, 65, GRAIN - 1, GRAIN, GRAIN + 1, 100_003, 381 * 96, 7 * 4864 * 61, 10**6 + 1]:
        whole = aligned_size(size, threads)
        shares = max(1, min(threads, -(-whole // GRAIN)))
        assert whole >= size
        assert whole % (shares * VECTOR) == 0
        assert whole - size < 2 * threads * VECTOR


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("function", [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.Tanh()])
def test_bits_of_an_activation_do_not_depend_on_the_batch(function):
    """torch alone differs here: the plain function shows it for at least one of the sizes."""
    model = nn.Sequential(function)
    assert align_activations(model) == 1
    made = model[0]
    assert isinstance(made, AlignedActivation)
    torch.manual_seed(0)
    x = torch.randn(1, 500, 96) * 3
    whole = made(x)
    assert torch.allclose(whole, function(x), atol=1e-6)
    plain_differs = 0
    for rows in (1, 2, 3, 17, 255, 341, 381, 383, 499):
        assert torch.equal(made(x[:, :rows]), whole[:, :rows])
        plain_differs += int((function(x[:, :rows]) != whole[:, :rows]).sum())
    strided = torch.cat([x, x], -1)[:, :381, :96]
    assert torch.equal(made(strided), whole[:, :381])
    if isinstance(function, nn.SiLU):
        assert plain_differs
