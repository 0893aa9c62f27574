"""From GGUF tensors to safetensors files with transformers' names. Needs torch; runs in the converting thread.

Memory stays near one shard: tensors are dequantised and written shard by shard.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, TensorNameMap, get_tensor_name_map
from gguf.quants import dequantize
from safetensors import SafetensorError
from safetensors.torch import save_file

from common.errors import ModelError
from worker.models.gguf_config import ARCHITECTURES, Architecture
from worker.models.gguf_file import GGUFFile, GGUFTensor

_SHARD_PARAMETERS = 256 * 1024 * 1024
_CHUNK_VALUES = 4 * 1024 * 1024
_FP16_LARGEST = 65504.0
_FP16_SMALLEST_SCALE = 2.0**-10
"""A tensor whose largest weight is smaller than this would lose precision in fp16's subnormal range."""

_UNMAPPED = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Tensors that became configuration (see gguf_config)."""


def write_weights(file: GGUFFile, config: dict[str, Any], folder: Path, on_bytes: Callable[[int, int], None]) -> None:
    """Write every weight of `file` to safetensors files in `folder`.

    Quantised and fp16 matrices become fp16 where their range allows (the rounding, 2^-11, is far below the quantisation
    step), bf16 stays bf16, everything else is float32. `on_bytes` gets bytes of the GGUF file done and in total.
    Raises ModelError when a weight is missing, left over or of the wrong shape.
    """
    weights = _weights(file, config)
    architecture = ARCHITECTURES[file.architecture]
    total = sum(weight.stored_bytes for weight in weights)
    shards = _shards(weights)
    done = 0
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for index, shard in enumerate(shards):
        title = "model.safetensors" if len(shards) == 1 else f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        values: dict[str, torch.Tensor] = {}
        for weight in shard:
            parts = [_convert(tensor, config, architecture) for tensor in weight.tensors]
            values[weight.name] = parts[0] if len(parts) == 1 else _concatenate(parts)
            done += weight.stored_bytes
            on_bytes(done, total)
        try:
            save_file(values, folder / title, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, among others
            raise ModelError(f"{title} cannot be written: {error}") from error
        weight_map |= dict.fromkeys(values, title)
        total_bytes += sum(value.numel() * value.element_size() for value in values.values())
    if len(shards) > 1:
        listing = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(listing, indent=1), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Weight:
    """One weight of the model and the GGUF tensors it is made of, joined along their rows."""

    name: str
    tensors: tuple[GGUFTensor, ...]

    @property
    def stored_bytes(self) -> int:
        return sum(len(tensor.raw) for tensor in self.tensors)

    @property
    def size(self) -> int:
        """The number of its values."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.tensors[0].shape
        if len(self.tensors) == 1:
            return first
        return (*first[:-2], sum(tensor.shape[-2] for tensor in self.tensors), first[-1])


def _weights(file: GGUFFile, config: dict[str, Any]) -> list[_Weight]:
    """Return every weight of the model, after comparing names and shapes with what the file has."""
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    name_map = get_tensor_name_map(arch, config["num_hidden_layers"])
    weights: list[_Weight] = []
    missing: list[str] = []
    for name, shape in _model_shapes(config).items():
        sources = _sources(name, name_map)
        if not all(source in file.tensors for source in sources):
            if not (name == "lm_head.weight" and config["tie_word_embeddings"]):
                missing.append(name)
            continue
        weight = _Weight(name, tuple(file.tensors[source] for source in sources))
        if weight.shape != shape:
            raise ModelError(f"tensor {sources[0]} has shape {weight.shape} where the model needs {shape}")
        weights.append(weight)
    used = {tensor.name for weight in weights for tensor in weight.tensors}
    left = sorted(file.tensors.keys() - used - _UNMAPPED)
    if missing or left:
        raise ModelError(
            f"the GGUF file does not fit {config['model_type']}: missing {missing[:5]}, left over {left[:5]}"
        )
    return weights


def _sources(name: str, name_map: TensorNameMap) -> list[str]:
    """Return the names of the GGUF tensors that make up one weight."""
    if experts := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj", name):
        kinds = {"gate_up": ("gate", "up"), "down": ("down",)}[experts[2]]
        return [f"blk.{experts[1]}.ffn_{kind}_exps.weight" for kind in kinds]
    stem, _, suffix = name.rpartition(".")
    return [f"{name_map.get_name(stem)}.{suffix}"]


def _model_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a model's weights, from a model without storage."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_config = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    return {name: tuple(weight.shape) for name, weight in model.state_dict().items()}


def _shards(weights: list[_Weight]) -> list[list[_Weight]]:
    shards: list[list[_Weight]] = [[]]
    held = 0
    for weight in weights:
        if shards[-1] and held + weight.size > _SHARD_PARAMETERS:
            shards.append([])
            held = 0
        shards[-1].append(weight)
        held += weight.size
    return shards


def _concatenate(parts: list[torch.Tensor]) -> torch.Tensor:
    """Join parts along their rows, in the widest of their types."""
    dtype = parts[0].dtype if len({part.dtype for part in parts}) == 1 else torch.float32
    return torch.cat([part.to(dtype) for part in parts], dim=-2)


def _convert(tensor: GGUFTensor, config: dict[str, Any], architecture: Architecture) -> torch.Tensor:
    weight = _dequantize(tensor)
    if architecture.norm_plus_one and tensor.name.endswith("norm.weight"):
        weight = weight - 1
    if architecture.permuted_rope and ".attn_q." in tensor.name:
        weight = _unpermute(weight, config["num_attention_heads"])
    if architecture.permuted_rope and ".attn_k." in tensor.name:
        weight = _unpermute(weight, config["num_key_value_heads"])
    return weight.contiguous()


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the row order that ggml's rope wants: pairs (0, 1), (2, 3) … back to (0, half), (1, half + 1) …"""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _dequantize(tensor: GGUFTensor) -> torch.Tensor:
    if tensor.type == GGMLQuantizationType.F32:
        return _from_numpy(tensor.raw.view(np.float32), tensor)
    if tensor.type == GGMLQuantizationType.F16:
        return _from_numpy(tensor.raw.view(np.float16), tensor)
    if tensor.type == GGMLQuantizationType.BF16:
        return _from_numpy(tensor.raw.view(np.int16), tensor).view(torch.bfloat16)
    halves, largest = _dequantize_rows(tensor, torch.float16)
    if len(tensor.shape) > 1 and (largest == 0 or _FP16_SMALLEST_SCALE <= largest <= _FP16_LARGEST):
        return halves
    return _dequantize_rows(tensor, torch.float32)[0]


def _dequantize_rows(tensor: GGUFTensor, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Return a quantised tensor's values as `dtype` and the largest magnitude, a chunk of rows at a time."""
    rows = tensor.raw.reshape(math.prod(tensor.shape[:-1]), -1)
    values = torch.empty((len(rows), tensor.shape[-1]), dtype=dtype)
    step = max(1, _CHUNK_VALUES // tensor.shape[-1])
    largest = 0.0
    for first in range(0, len(rows), step):
        try:
            chunk = torch.from_numpy(dequantize(rows[first : first + step], tensor.type))
        except NotImplementedError as error:
            raise ModelError(f"tensor {tensor.name} is stored as {tensor.type.name}, which cannot be read") from error
        largest = max(largest, chunk.abs().max().item())
        values[first : first + step] = chunk
    return values.reshape(tensor.shape), largest


def _from_numpy(values: np.ndarray, tensor: GGUFTensor) -> torch.Tensor:
    return torch.from_numpy(values.reshape(tensor.shape).copy())
