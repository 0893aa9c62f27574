"""A small byte-level BPE tokenizer with control tokens and a chat template, made on the spot.

It has a token for every byte and few merges, so emoji and CJK are always spread over several tokens.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "hello world, this is a small tokenizer for tests",
    "the quick brown fox jumps over the lazy dog",
    "user assistant system answer question stop word",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BOS, IM_START, IM_END = SPECIAL

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

STRICT = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>\n' }}"
    "{% endfor %}<|im_start|>assistant\n"
)
"""Refuses a system message and roles that do not alternate, and writes BOS, as Gemma's does."""


def build(adds_bos: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    return tokenizer


def write(folder: Path, template: str | None = CHATML, adds_bos: bool = False) -> Path:
    """Write a model's text files to a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    build(adds_bos).save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": {"content": IM_END}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
