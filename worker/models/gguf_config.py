"""From GGUF metadata to the configuration of a transformers model. Plain dictionaries; never imports torch.

Each supported architecture is one row of ARCHITECTURES. Everything that changes the numbers a model computes (rope
scaling, soft caps, attention scale, biases, sliding windows) is either translated or refused, never dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import ModelError
from worker.models.gguf_file import GGUFFile

Config = dict[str, Any]

_COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one GGUF architecture maps to transformers.

    `permuted_rope`: query and key rows are stored in ggml's interleaved order. `norm_plus_one`: norm weights are stored
    with 1 added. `extra` completes the configuration.
    """

    model_type: str
    class_name: str
    extra: Callable[[GGUFFile, Config], None]
    permuted_rope: bool = False
    norm_plus_one: bool = False


def build_config(file: GGUFFile) -> Config:
    """Return the contents of config.json. Raises ModelError for what has no translation."""
    architecture = ARCHITECTURES.get(file.architecture)
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"GGUF architecture {file.architecture!r} is not supported; supported are {known}")
    config: Config = {"model_type": architecture.model_type, "architectures": [architecture.class_name]}
    for key, name in _COMMON.items():
        value = file.get(key)
        if value is None:
            value = _required(file, "attention.head_count" if key == "attention.head_count_kv" else key)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise ModelError(f"{key} differs between layers; such models are not supported as GGUF")
            value = value[0].item()
        config[name] = value
    config["rms_norm_eps"] = _short_float(config["rms_norm_eps"])
    if "token_embd.weight" not in file.tensors:
        raise ModelError("the GGUF file lacks token_embd.weight")
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["rope_parameters"] = _rope(file, config)
    config["dtype"] = "float32"
    architecture.extra(file, config)
    return config


def _required(file: GGUFFile, key: str) -> Any:
    value = file.get(key)
    if value is None:
        raise ModelError(f"the GGUF file lacks {file.architecture}.{key}")
    return value


def _short_float(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-06 instead of 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _rope(file: GGUFFile, config: Config) -> Config:
    rope: Config = {"rope_type": "default", "rope_theta": _short_float(file.get("rope.freq_base", 10000.0))}
    kind = file.get("rope.scaling.type", "none")
    factor = file.get("rope.scaling.factor") or file.get("rope.scale_linear")
    original = file.get("rope.scaling.original_context_length")
    if "rope_freqs.weight" in file.tensors:
        rope |= _llama3_rope(file.tensors["rope_freqs.weight"].raw.view(np.float32), rope["rope_theta"])
    elif kind == "yarn" and factor:
        rope |= {"rope_type": "yarn", "factor": _short_float(factor)}
        if original:
            rope["original_max_position_embeddings"] = int(original)
    elif kind == "longrope" or "rope_factors_long.weight" in file.tensors:
        rope |= _longrope(file, config, original)
    elif factor and factor != 1.0 and kind in ("none", "linear"):
        rope |= {"rope_type": "linear", "factor": _short_float(factor)}
    elif kind not in ("none", "linear"):
        raise ModelError(f"rope scaling of type {kind!r} is not supported as GGUF")
    return rope


def _llama3_rope(factors: np.ndarray, theta: float) -> Config:
    """Recover the parameters of Llama 3's rope scaling from the factors per frequency that GGUF stores.

    `factors`: float32 [head_dim / 2]. All models that use it share the three constants tried here; they are checked by
    computing the factors again.
    """
    factor = float(factors.max())
    low, high, original = 1.0, 4.0, 8192
    if factor <= 1.0:
        return {}
    wavelength = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1 - smooth) / factor + smooth)
    if not np.allclose(expected, factors, rtol=1e-3):
        raise ModelError("the rope factors of the GGUF file (rope_freqs.weight) are not those of Llama 3's scaling")
    return {
        "rope_type": "llama3",
        "factor": _short_float(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _longrope(file: GGUFFile, config: Config, original: int | None) -> Config:
    if "rope_factors_long.weight" not in file.tensors or "rope_factors_short.weight" not in file.tensors:
        raise ModelError("the GGUF file asks for longrope but lacks its factors")
    config["original_max_position_embeddings"] = int(original or config["max_position_embeddings"])
    rope: Config = {
        "rope_type": "longrope",
        "long_factor": [_short_float(x) for x in file.tensors["rope_factors_long.weight"].raw.view(np.float32)],
        "short_factor": [_short_float(x) for x in file.tensors["rope_factors_short.weight"].raw.view(np.float32)],
        "original_max_position_embeddings": config["original_max_position_embeddings"],
    }
    attention_factor = file.get("rope.scaling.attn_factor")
    if attention_factor:
        rope["attention_factor"] = _short_float(attention_factor)
    return rope


def _head_dim(file: GGUFFile, config: Config) -> int:
    return int(file.get("attention.key_length") or config["hidden_size"] // config["num_attention_heads"])


def _llama(file: GGUFFile, config: Config) -> None:
    config["head_dim"] = int(
        file.get("attention.key_length") or file.get("rope.dimension_count") or _head_dim(file, config)
    )
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    experts = file.get("expert_count")
    if experts:
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "sliding_window": None}
        config |= {"num_local_experts": int(experts), "num_experts_per_tok": int(_required(file, "expert_used_count"))}
    window = file.get("attention.sliding_window")
    if window and not experts:  # only Mistral among the models of this architecture has one
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": int(window)}


def _qwen2(file: GGUFFile, config: Config) -> None:
    config["use_sliding_window"] = False


def _qwen3(file: GGUFFile, config: Config) -> None:
    config |= {"head_dim": _head_dim(file, config), "use_sliding_window": False}
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors


def _qwen3moe(file: GGUFFile, config: Config) -> None:
    _qwen3(file, config)
    config |= {
        "num_experts": int(_required(file, "expert_count")),
        "num_experts_per_tok": int(_required(file, "expert_used_count")),
        "moe_intermediate_size": int(_required(file, "expert_feed_forward_length")),
        "norm_topk_prob": True,  # not in the file; llama.cpp always does
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _phi3(file: GGUFFile, config: Config) -> None:
    config["sliding_window"] = int(window) if (window := file.get("attention.sliding_window")) else None
    rotary = file.get("rope.dimension_count")
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    config["rope_parameters"]["partial_rotary_factor"] = rotary / head_dim if rotary else 1.0
    config |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def _gemma2(file: GGUFFile, config: Config) -> None:
    head_dim = _head_dim(file, config)
    wide = config["num_hidden_layers"] == 46  # the 27B model scales by hidden size over heads
    config |= {
        "head_dim": head_dim,
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if wide else head_dim,
        "attn_logit_softcapping": _short_float(file.get("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": _short_float(file.get("final_logit_softcapping", 30.0)),
        "sliding_window": int(file.get("attention.sliding_window", 4096)),
    }


def _gemma3(file: GGUFFile, config: Config) -> None:
    head_dim = _head_dim(file, config)
    wide = config["num_hidden_layers"] == 62  # the 27B model scales by hidden size over heads
    period = int(file.get("attention.sliding_window_pattern", 6))
    layers = range(config["num_hidden_layers"])
    local_theta = file.get("rope.freq_base_swa", 10000.0)
    config |= {
        "head_dim": head_dim,
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if wide else head_dim,
        "sliding_window": int(file.get("attention.sliding_window", 1024)),
        "layer_types": ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in layers],
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": _short_float(local_theta)},
        },
    }


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _llama, permuted_rope=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _qwen2),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _qwen3),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3moe),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _phi3),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _gemma2, norm_plus_one=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3, norm_plus_one=True),
}
