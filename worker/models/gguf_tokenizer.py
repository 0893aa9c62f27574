"""From a GGUF file's vocabulary to a tokenizer folder: tokenizer.json, its configuration and the chat template.

Two kinds are built: byte-level BPE ("gpt2") and SentencePiece BPE ("llama"), whose merges follow from its scores. Never
imports torch.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from common.errors import ModelError
from worker.models.gguf_file import GGUFFile
from worker.models.gguf_pretokenizers import find_pre_tokenizer

log = logging.getLogger(__name__)

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_SPACE = "▁"

END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|eot|>",
    "<end_of_turn>",
    "<turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end_of_turn|>",
    "<｜end▁of▁sentence｜>",
    "<|endofassistant|>",
    "<EOT>",
)
"""Tokens that end an answer wherever a vocabulary has them as control tokens, besides those the file names."""

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer part of a GGUF file. `types` are the numbers of llama.cpp's token types."""

    kind: str
    tokens: list[str]
    types: np.ndarray
    ids: dict[str, int]
    """Named special ids: bos_token_id, eos_token_id, eot_token_id, …"""

    def named(self, key: str) -> str | None:
        """Return the text of a named special token, or None."""
        index = self.ids.get(key)
        return None if index is None else self.tokens[index]

    def end_token_ids(self) -> list[int]:
        """Return every id that ends generation, ascending."""
        found = {self.ids[key] for key in _END_KEYS if key in self.ids}
        special = {text: i for i, text in enumerate(self.tokens) if self.types[i] in (_CONTROL, _USER_DEFINED)}
        return sorted(found | {special[text] for text in END_TOKENS if text in special})


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Return the file's vocabulary. Raises ModelError when it has none or one that does not add up."""
    metadata = file.metadata
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not kind or not tokens:
        raise ModelError("the GGUF file has no tokenizer")
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        types = np.ones(len(tokens), dtype=np.int32)
    if len(types) != len(tokens):
        raise ModelError("the GGUF file's tokenizer does not have a type for each token")
    prefix = "tokenizer.ggml."
    keys = (*_END_KEYS, "bos_token_id", "unknown_token_id", "padding_token_id")
    ids = {key: int(metadata[prefix + key]) for key in keys if prefix + key in metadata}
    return Vocabulary(kind, tokens, types, {key: i for key, i in ids.items() if 0 <= i < len(tokens)})


def write_tokenizer(file: GGUFFile, vocabulary: Vocabulary, context_length: int, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, where the file has one, chat_template.jinja to `folder`."""
    match vocabulary.kind:
        case "gpt2":
            tokenizer, add_bos = _byte_level_bpe(file, vocabulary)
        case "llama":
            tokenizer, add_bos = _sentencepiece_bpe(file, vocabulary)
        case kind:
            raise ModelError(f"GGUF tokenizers of type {kind!r} are not supported; use the model's safetensors instead")
    add_bos = bool(file.metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    add_eos = bool(file.metadata.get("tokenizer.ggml.add_eos_token", False))
    _add_template(tokenizer, vocabulary, add_bos, add_eos)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.named("bos_token_id"),
        "eos_token": vocabulary.named("eos_token_id"),
        "unk_token": vocabulary.named("unknown_token_id"),
        "pad_token": vocabulary.named("padding_token_id"),
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", {key: value for key, value in settings.items() if value is not None})
    template = file.metadata.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def write_generation_config(vocabulary: Vocabulary, folder: Path) -> None:
    """Write generation_config.json, whose eos_token_id lists every token that ends an answer."""
    settings: dict[str, Any] = {"eos_token_id": vocabulary.end_token_ids()}
    for key, name in (("bos_token_id", "bos_token_id"), ("padding_token_id", "pad_token_id")):
        if key in vocabulary.ids:
            settings[name] = vocabulary.ids[key]
    _write_json(folder / "generation_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --- byte-level BPE ("gpt2") ----------------------------------------------------------------------------------------


def _byte_level_bpe(file: GGUFFile, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Return the tokenizer and whether it starts a sequence with BOS by default."""
    name = file.metadata.get("tokenizer.ggml.pre")
    if name is None:
        log.warning("the GGUF file does not name its pre-tokenizer; cutting words as GPT-2 does")
        name = "gpt-2"
    cut = find_pre_tokenizer(name)
    merges = [_pair(merge) for merge in file.metadata.get("tokenizer.ggml.merges", [])]
    words = {token: index for index, token in enumerate(vocabulary.tokens)}
    try:
        model = models.BPE(vocab=words, merges=merges, ignore_merges=cut.ignore_merges)
    except Exception as error:  # the library raises just that for a merge outside the vocabulary
        raise ModelError(f"the GGUF file's vocabulary does not fit its merges: {error}") from error
    tokenizer = Tokenizer(model)
    normalizer = cut.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = cut.build()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, vocabulary.tokens, vocabulary.types)
    return tokenizer, cut.add_bos


def _pair(merge: str) -> tuple[str, str]:
    """Split "a b" at its one space; a part may start with what looks like one only if it is not the separator."""
    left, _, right = merge.partition(" ")
    return left, right


# --- SentencePiece BPE ("llama") ------------------------------------------------------------------------------------


def _sentencepiece_bpe(file: GGUFFile, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Return the tokenizer and whether it starts a sequence with BOS by default.

    SentencePiece joins, again and again, the two neighbours whose union has the highest score. The same result as BPE:
    every way to cut a piece into two pieces is a merge, ranked by the score of the piece.
    """
    scores = file.metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise ModelError("the GGUF file's SentencePiece tokenizer has no scores")
    types = vocabulary.types
    # user-defined pieces are stored as plain text, but are matched in text whose spaces are marks already
    tokens = [
        text.replace(" ", _SPACE) if kind == _USER_DEFINED else text
        for text, kind in zip(vocabulary.tokens, types.tolist(), strict=True)
    ]
    words = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(
        vocab=words,
        merges=_merges(tokens, scores, types),
        unk_token=vocabulary.named("unknown_token_id"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    if not prefix:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    # with a prefix the normalizer would put one before the piece that is looked for, too
    eats_spaces = file.metadata.get("general.architecture") == "phi3"
    _add_tokens(tokenizer, tokens, types, normalized=not prefix, eats_spaces=eats_spaces)
    return tokenizer, True


def _merges(tokens: Sequence[str], scores: np.ndarray, types: np.ndarray) -> list[tuple[str, str]]:
    """Return the merges in rank order: by the score of the union; among equals, the longer left part first.

    Linear in the total length of the pieces but for the sort. Control tokens are never a union or a part.
    """
    usable = ~np.isin(types, (_CONTROL, _UNKNOWN, _UNUSED))
    words = {token: index for index, token in enumerate(tokens) if usable[index]}
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in words.items():
        rank = -float(scores[index])
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in words:
                right = token[cut:]
                if right in words:
                    found.append((rank, -len(left), -len(right), left, right))
    found.sort(key=lambda merge: merge[:3])  # stable: equals stay in the vocabulary's order
    return [(left, right) for _, _, _, left, right in found]


# --- both -----------------------------------------------------------------------------------------------------------


def _add_tokens(
    tokenizer: Tokenizer,
    tokens: Sequence[str],
    types: np.ndarray,
    normalized: bool = False,
    eats_spaces: bool = False,
) -> None:
    """Make control tokens special and user-defined tokens whole; all have their place in the vocabulary already.

    `normalized`: user-defined tokens are looked for after the normalizer. `eats_spaces`: whitespace after a control
    token belongs to it, as in Phi-3, whose template puts a line break there; the file does not say so.
    """
    kinds = types.tolist()
    # the unknown token is special too: it never belongs in an answer
    special = [i for i, kind in enumerate(kinds) if kind in (_CONTROL, _UNKNOWN)]
    user_defined = [i for i, kind in enumerate(kinds) if kind == _USER_DEFINED]
    plain = {"<unk>", "<s>", "<|endoftext|>"}
    tokenizer.add_special_tokens(
        [
            AddedToken(tokens[i], special=True, normalized=False, rstrip=eats_spaces and tokens[i] not in plain)
            for i in special
        ]
    )
    tokenizer.add_tokens([AddedToken(tokens[i], special=False, normalized=normalized) for i in user_defined])


def _add_template(tokenizer: Tokenizer, vocabulary: Vocabulary, add_bos: bool, add_eos: bool) -> None:
    """Make encoding (unless told not to) put BOS before and EOS after the text, where the model wants them."""
    start, end = vocabulary.named("bos_token_id"), vocabulary.named("eos_token_id")
    before = [start] if add_bos and start is not None else []
    after = [end] if add_eos and end is not None else []
    steps: list[processors.PostProcessor] = []
    if vocabulary.kind == "gpt2":
        steps.append(processors.ByteLevel(trim_offsets=False))
    if before or after:
        special = {token: vocabulary.tokens.index(token) for token in (*before, *after)}
        steps.append(
            processors.TemplateProcessing(
                single=[*before, "$A", *after],
                pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1"]
                + [f"{token}:1" for token in after],
                special_tokens=list(special.items()),
            )
        )
    if steps:
        tokenizer.post_processor = processors.Sequence(steps) if len(steps) > 1 else steps[0]
