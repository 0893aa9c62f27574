"""Tiny models with random weights, one for each family whose attention differs, and what transformers makes of them."""

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 199

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def _config(family: str) -> PreTrainedConfig:
    match family:
        case "llama":
            return transformers.LlamaConfig(**_COMMON)
        case "qwen2":
            return transformers.Qwen2Config(**_COMMON)
        case "qwen3":
            return transformers.Qwen3Config(**_COMMON, head_dim=32)
        case "gemma2":
            return transformers.Gemma2Config(
                **_COMMON | {"num_hidden_layers": 4},
                head_dim=32,
                query_pre_attn_scalar=32,
                sliding_window=24,
            )
        case "gemma3":
            return transformers.Gemma3TextConfig(
                **_COMMON | {"num_hidden_layers": 4, "num_key_value_heads": 1},
                head_dim=32,
                query_pre_attn_scalar=32,
                sliding_window=24,
                layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            )
        case "mistral":
            return transformers.MistralConfig(**_COMMON, sliding_window=20)
        case "phi3":
            return transformers.Phi3Config(**_COMMON | {"num_key_value_heads": 4})
        case "gpt2":
            return transformers.GPT2Config(
                vocab_size=VOCAB_SIZE,
                n_embd=64,
                n_layer=3,
                n_head=4,
                n_positions=512,
                initializer_range=0.2,
                bos_token_id=1,
                eos_token_id=2,
            )
        case "qwen3_moe":
            return transformers.Qwen3MoeConfig(
                **_COMMON, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48
            )
        case "gpt_oss":
            return transformers.GptOssConfig(
                **_COMMON | {"num_hidden_layers": 2},
                head_dim=16,
                num_local_experts=4,
                num_experts_per_tok=2,
                sliding_window=24,
            )
    raise ValueError(family)


FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "phi3", "gpt2", "qwen3_moe", "gpt_oss")


def tiny_model(family: str, attention: str = "eager", seed: int = 0) -> PreTrainedModel:
    """Return a float32 model with the same weights for the same family and seed, whatever its attention."""
    config = _config(family)
    config._attn_implementation = attention
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def reference_tokens(model: PreTrainedModel, prompt_ids: list[int], count: int) -> list[int]:
    """Greedy tokens by model.generate, end-of-sequence tokens not heeded."""
    output = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt_ids) :].tolist()
