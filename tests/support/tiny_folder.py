"""A folder with a tiny model of random weights, its tokenizer and, if wanted, a chat template: `serve` can load it."""

from pathlib import Path

import torch
import transformers

from tests.support import tiny_tokenizer

CONTEXT_TOKENS = 16384
"""Room for streams that last as long as a test needs them."""


def write_model(folder: Path, template: str | None = tiny_tokenizer.CHATML) -> Path:
    """Write the model to `folder`, and return it."""
    tiny_tokenizer.write(folder, template)
    config = transformers.Qwen2Config(
        vocab_size=tiny_tokenizer.build().get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
