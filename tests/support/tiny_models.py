"""Tiny models with random weights, one for each family whose attention differs, and what transformers makes of them."""

import random
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from common.params import SamplingParams
from common.wire import Failed, Finished, Submit, Tokens
from worker.activation import align_activations
from worker.engine import Engine
from worker.kv_cache import KVCacheManager
from worker.linear import pack_linears
from worker.runner import TorchRunner
from worker.scheduler import Scheduler, SchedulerConfig

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


@lru_cache(maxsize=32)
def packed_model(family: str, quantization: str = "none") -> PreTrainedModel:
    """Return the model as the runner takes it. Shared between tests: nothing changes its weights."""
    model = tiny_model(family, attention="paged_torch")
    pack_linears(model, quantization, int8_min_weights=0)
    align_activations(model)
    return model


def tiny_engine(
    family: str,
    *,
    quantization: str = "none",
    num_blocks: int = 256,
    block_size: int = 8,
    max_batch_tokens: int = 256,
    max_batch_size: int = 32,
) -> Engine:
    """Return a real engine over a tiny model."""
    config = SchedulerConfig(
        max_batch_tokens=max_batch_tokens,
        max_batch_size=max_batch_size,
        max_queued_requests=100,
        max_model_len=512,
        vocab_size=VOCAB_SIZE,
    )
    scheduler = Scheduler(config, KVCacheManager(num_blocks, block_size))
    return Engine(scheduler, TorchRunner(packed_model(family, quantization), num_blocks, block_size))


@dataclass
class Answer:
    """What an engine gave for one request."""

    tokens: list[int] = field(default_factory=list)
    end: Finished | Failed | None = None


def answers(
    engine: Engine, prompts: list[list[int]], count: int, params: SamplingParams | list[SamplingParams]
) -> list[Answer]:
    """Submit all prompts at once and run the engine until it is idle."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    found = {str(at): Answer() for at in range(len(prompts))}
    for at, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        engine.add(Submit(str(at), "p/0123456789abcdef/", prompt, one, count, ignore_eos=True))
    for _ in range(10_000):
        for event in engine.take_events():
            if isinstance(event, Tokens):
                assert event.pos == len(found[event.id].tokens)
                found[event.id].tokens += event.ids
            elif isinstance(event, Finished | Failed):
                found[event.id].end = event
        if not engine.has_work:
            return list(found.values())
        engine.step()
    raise AssertionError("the engine does not come to an end")


def prompt_of(length: int, seed: int) -> list[int]:
    """Return a random prompt without special tokens."""
    chooser = random.Random(seed)
    return [chooser.randrange(3, VOCAB_SIZE) for _ in range(length)]
