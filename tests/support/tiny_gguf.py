"""Tiny random models written as GGUF files, with the layout llama.cpp's converter gives them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PretrainedConfig, PreTrainedModel

Q8_0, F16, BF16, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "F16", "BF16", "F32"))
VOCABULARY = 320
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<tool_call>"]


def write_tiny_gguf(
    path: Path,
    arch: str,
    model: PreTrainedModel,
    quantization: gguf.GGMLQuantizationType = F32,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    permuted_rope: bool = False,
    norm_plus_one: bool = False,
    drop: tuple[str, ...] = (),
) -> None:
    """Write `model` to `path`, and put what the file holds (after rounding) back into the model's own weights.

    `metadata` are extra values under the architecture's prefix (or, with a dot in front, under none); `tensors` extra
    tensors; `drop` names of metadata or tensors to leave out.
    """
    writer = gguf.GGUFWriter(str(path), arch)
    values = _hyper_parameters(model.config) | _byte_level_vocabulary() | (metadata or {})
    for key, value in values.items():
        if key not in drop:
            _add(writer, key.removeprefix(".") if key.startswith(".") else f"{arch}.{key}", value)
    names = gguf.get_tensor_name_map(
        next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), model.config.num_hidden_layers
    )
    state = model.state_dict()
    tied = model.config.tie_word_embeddings
    for hf_name, weight in state.items():
        if ".mlp.experts." in hf_name:
            for name, part in _experts(hf_name, weight):
                writer.add_tensor(name, part)
            continue
        stem, _, suffix = hf_name.rpartition(".")
        name = f"{names.get_name(stem)}.{suffix}"
        if name in drop or (tied and hf_name == "lm_head.weight"):
            continue
        stored = weight.detach().clone().float()
        if permuted_rope and (".attn_q." in name or ".attn_k." in name):
            heads = model.config.num_attention_heads if ".attn_q." in name else model.config.num_key_value_heads
            stored = stored.reshape(heads, 2, -1, *stored.shape[1:]).transpose(1, 2).reshape(stored.shape)
        if norm_plus_one and name.endswith("norm.weight"):
            stored = stored + 1
        kind = quantization if stored.dim() == 2 else F32
        data = quantize(stored.numpy(), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        back = torch.from_numpy(np.array(dequantize(data, kind)).reshape(stored.shape))
        if kind == Q8_0:
            back = back.half().float()
        if norm_plus_one and name.endswith("norm.weight"):
            back = back - 1
        if permuted_rope and (".attn_q." in name or ".attn_k." in name):
            back = back.reshape(heads, -1, 2, *back.shape[1:]).transpose(1, 2).reshape(back.shape)
        weight.copy_(back)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _experts(hf_name: str, weight: torch.Tensor) -> list[tuple[str, np.ndarray]]:
    """llama.cpp's tensors of one layer's experts: gate, up and down apart, each stacked over the experts."""
    prefix = f"blk.{hf_name.split('.')[2]}.ffn_"
    if hf_name.endswith("down_proj"):
        return [(f"{prefix}down_exps.weight", weight.numpy())]
    gate, up = weight.chunk(2, dim=1)
    return [(f"{prefix}{kind}_exps.weight", part.contiguous().numpy()) for kind, part in (("gate", gate), ("up", up))]


def _hyper_parameters(config: PretrainedConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "feed_forward_length": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", config.num_attention_heads),
        "attention.layer_norm_rms_epsilon": float(getattr(config, "rms_norm_eps", 1e-6)),
    }
    if getattr(config, "head_dim", None):
        values["attention.key_length"] = config.head_dim
    return values


def _byte_level_vocabulary() -> dict[str, Any]:
    tokens = [*sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    types = [1] * len(tokens) + [3] * len(SPECIAL) + [4] * len(USER_DEFINED)
    tokens += SPECIAL + USER_DEFINED
    unused = VOCABULARY - len(tokens)
    return {
        ".tokenizer.ggml.model": "gpt2",
        ".tokenizer.ggml.pre": "qwen2",
        ".tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(unused)],
        ".tokenizer.ggml.token_type": types + [5] * unused,
        ".tokenizer.ggml.merges": MERGES,
        ".tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        ".tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
