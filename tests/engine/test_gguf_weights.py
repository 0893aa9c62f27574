"""Converting GGUF files of tiny random models: what transformers loads from the folder computes the same numbers."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
)

from common.errors import ModelError
from tests.support.tiny_gguf import BF16, F16, F32, Q8_0, VOCABULARY, write_tiny_gguf
from worker.models import gguf_weights
from worker.models.gguf_convert import convert
from worker.models.progress import Progress

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA3_LAYERS = ["sliding_attention"] * 5 + ["full_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i / 4 for i in range(8)],
    "original_max_position_embeddings": 64,
}


def tiny(config: PretrainedConfig) -> PreTrainedModel:
    """A random float32 model whose norms and biases are not the trivial ones."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


def llama3_factors() -> np.ndarray:
    """The factors that llama.cpp's converter stores for LLAMA3_ROPE and heads of 16."""
    factors = []
    for i in range(8):
        wavelength = 2 * np.pi * 500000.0 ** (2 * i / 16)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / 32 + smooth))
    return np.array(factors, dtype=np.float32)


def logits(model: PreTrainedModel, length: int = 40) -> torch.Tensor:
    ids = torch.arange(length)[None] * 7 % VOCABULARY
    with torch.no_grad():
        result: torch.Tensor = model(ids).logits
    return result


def ignore(progress: Progress) -> None:
    pass


CASES: dict[str, tuple[str, PretrainedConfig, dict[str, Any]]] = {
    "llama": ("llama", LlamaConfig(**SIZES, rope_theta=10000.0), {"permuted_rope": True}),
    "llama tied, wide heads": (
        "llama",
        LlamaConfig(**SIZES, head_dim=32, tie_word_embeddings=True),
        {"permuted_rope": True},
    ),
    "llama 3 rope": (
        "llama",
        LlamaConfig(**SIZES | {"max_position_embeddings": 131072}, rope_parameters=LLAMA3_ROPE),
        {
            "permuted_rope": True,
            "metadata": {"rope.freq_base": 500000.0},
            "tensors": {"rope_freqs.weight": llama3_factors()},
        },
    ),
    "llama with biases": ("llama", LlamaConfig(**SIZES, attention_bias=True), {"permuted_rope": True}),
    "mistral window": (
        "llama",
        MistralConfig(**SIZES, sliding_window=16),
        {"permuted_rope": True, "metadata": {"attention.sliding_window": 16}},
    ),
    "qwen2": ("qwen2", Qwen2Config(**SIZES, rope_theta=1e6), {"metadata": {"rope.freq_base": 1e6}}),
    "qwen2 yarn": (
        "qwen2",
        Qwen2Config(**SIZES, rope_parameters=YARN),
        {
            "metadata": {
                "rope.freq_base": 1e6,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            }
        },
    ),
    "qwen3": ("qwen3", Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True), {}),
    "phi3": ("phi3", Phi3Config(**SIZES), {"metadata": {"rope.dimension_count": 16}}),
    "phi3 window and longrope": (
        "phi3",
        Phi3Config(**SIZES, sliding_window=16, rope_parameters=LONG, original_max_position_embeddings=64),
        {
            "metadata": {
                "rope.dimension_count": 16,
                "attention.sliding_window": 16,
                "rope.scaling.original_context_length": 64,
            },
            "tensors": {
                "rope_factors_short.weight": np.array(LONG["short_factor"], dtype=np.float32),
                "rope_factors_long.weight": np.array(LONG["long_factor"], dtype=np.float32),
            },
        },
    ),
    "qwen3 with experts": (
        "qwen3moe",
        Qwen3MoeConfig(
            **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
        ),
        {"metadata": {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}},
    ),
    "mixtral": (
        "llama",
        MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, rope_theta=1e6),
        {
            "permuted_rope": True,
            "metadata": {"expert_count": 4, "expert_used_count": 2, "rope.freq_base": 1e6},
        },
    ),
    "gemma2": (
        "gemma2",
        Gemma2Config(**SIZES, head_dim=32, query_pre_attn_scalar=32, sliding_window=16),
        {
            "norm_plus_one": True,
            "metadata": {
                "attention.sliding_window": 16,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
        },
    ),
    "gemma3": (
        "gemma3",
        Gemma3TextConfig(
            **SIZES | {"num_hidden_layers": 6},
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=16,
            layer_types=GEMMA3_LAYERS,
            rope_parameters=GEMMA3_ROPE,
        ),
        {
            "norm_plus_one": True,
            "metadata": {
                "attention.sliding_window": 16,
                "rope.freq_base": 1e6,
                "rope.scaling.type": "linear",
                "rope.scaling.factor": 8.0,
            },
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_converted_model_computes_the_same_logits(tmp_path: Path, case: str):
    """Names, row order, norms, biases, windows and rope scaling of each architecture arrive: logits are equal."""
    arch, config, options = CASES[case]
    model = tiny(config)
    write_tiny_gguf(tmp_path / "tiny.gguf", arch, model, **options)
    folder = convert(tmp_path / "tiny.gguf", tmp_path / "cache", ignore)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert type(loaded) is type(model)
    length = 100 if "longrope" in case else 40
    torch.testing.assert_close(logits(loaded, length), logits(model, length), rtol=0, atol=1e-5)


def test_an_architecture_that_only_transformers_knows_is_converted_by_it(tmp_path: Path):
    """No fast path, the same result: logits are equal, and the tokenizer and the end tokens are there."""
    model = tiny(StableLmConfig(**SIZES))
    metadata = {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 4}
    write_tiny_gguf(tmp_path / "tiny.gguf", "stablelm", model, metadata=metadata)
    folder = convert(tmp_path / "tiny.gguf", tmp_path / "cache", ignore)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-5)
    assert (folder / "tokenizer.json").exists()
    assert len(loaded.generation_config.eos_token_id) == 2


def test_an_architecture_that_nobody_knows_is_refused_by_name(tmp_path: Path):
    """The message names the architecture."""
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "wavenet")
    writer.add_uint32("wavenet.context_length", 16)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "gpt-2")
    writer.add_array("tokenizer.ggml.tokens", ["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="wavenet"):
        convert(tmp_path / "x.gguf", tmp_path / "cache", ignore)


@pytest.mark.parametrize("kind", [F32, F16, BF16, Q8_0], ids=lambda kind: kind.name)
def test_each_storage_type_keeps_its_values(tmp_path: Path, kind: gguf.GGMLQuantizationType):
    """Whatever type the matrices have, the folder holds the file's values (8-bit ones rounded to fp16 once)."""
    model = tiny(Qwen2Config(**SIZES))
    write_tiny_gguf(tmp_path / "tiny.gguf", "qwen2", model, kind)
    folder = convert(tmp_path / "tiny.gguf", tmp_path / "cache", ignore)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


@pytest.mark.parametrize("scale", [1e6, 1e-3], ids=["large", "small"])
def test_matrices_beyond_fp16_stay_float32(tmp_path: Path, scale: float):
    """A quantised matrix with values past 65504, or none above fp16's subnormal range, is kept exactly, in float32."""
    model = tiny(Qwen2Config(**SIZES))
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.mul_(scale)
    expected = torch.from_numpy(dequantize(quantize(weight.detach().numpy(), Q8_0), Q8_0))
    write_tiny_gguf(tmp_path / "tiny.gguf", "qwen2", model, Q8_0)
    folder = convert(tmp_path / "tiny.gguf", tmp_path / "cache", ignore)
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(stored["model.layers.0.mlp.up_proj.weight"], expected)
    assert stored["model.layers.1.mlp.up_proj.weight"].dtype == torch.float16


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Memory stays bounded by cutting the weights into several files, which load like one."""
    monkeypatch.setattr(gguf_weights, "_SHARD_PARAMETERS", 30_000)
    model = tiny(LlamaConfig(**SIZES))
    write_tiny_gguf(tmp_path / "tiny.gguf", "llama", model, permuted_rope=True)
    folder = convert(tmp_path / "tiny.gguf", tmp_path / "cache", ignore)
    assert len(list(folder.glob("*.safetensors"))) > 2
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model), rtol=0, atol=1e-5)


def test_generation_ends_at_every_end_token(tmp_path: Path):
    """generation_config.json lists <|im_end|> (which the file names) and <|endoftext|> (well known), not just one."""
    model = tiny(Qwen2Config(**SIZES))
    write_tiny_gguf(tmp_path / "tiny.gguf", "qwen2", model)
    folder = convert(tmp_path / "tiny.gguf", tmp_path / "cache", ignore)
    tokens = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    expected = sorted([tokens["<|im_end|>"], tokens["<|endoftext|>"]])
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": ("blk.1.ffn_up.weight",)}, r"missing \['model\.layers\.1\.mlp\.up_proj\.weight'\]"),
        ({"tensors": {"extra.weight": np.zeros(4, np.float32)}}, r"left over \['extra\.weight'\]"),
        ({"metadata": {"feed_forward_length": 128}}, "shape"),
        ({"metadata": {"rope.scaling.type": "spiral"}}, "spiral"),
        ({"metadata": {".tokenizer.ggml.pre": "unheard-of"}}, "unheard-of"),
        ({"metadata": {".tokenizer.ggml.model": "wordpiece"}}, "wordpiece"),
        ({"drop": (".tokenizer.ggml.tokens",)}, "no tokenizer"),
        ({"drop": ("block_count",)}, r"lacks qwen2\.block_count"),
        ({"drop": ("token_embd.weight",)}, r"lacks token_embd\.weight"),
        ({"metadata": {".split.count": 2}}, "one part of a split GGUF"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, options: dict[str, Any], message: str):
    """A file whose parts do not add up to a model is a clear error, and leaves no half-made folder."""
    write_tiny_gguf(tmp_path / "tiny.gguf", "qwen2", tiny(Qwen2Config(**SIZES)), **options)
    with pytest.raises(ModelError, match=message):
        convert(tmp_path / "tiny.gguf", tmp_path / "cache", ignore)
    assert [p for p in (tmp_path / "cache" / "models").iterdir() if p.is_dir()] == []
