"""Tokenizers built from GGUF vocabularies: the two kinds on small vocabularies whose right answer is known."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from common.errors import ModelError
from worker.models.gguf_file import GGUFFile
from worker.models.gguf_pretokenizers import find_pre_tokenizer
from worker.models.gguf_tokenizer import read_vocabulary, write_tokenizer

BYTES = [f"<0x{i:02X}>" for i in range(256)]


def build(tmp_path: Path, **metadata: Any) -> Tokenizer:
    """Write the tokenizer folder of a file with these tokenizer.ggml values and load its tokenizer.json."""
    file = GGUFFile({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, {})
    write_tokenizer(file, read_vocabulary(file), 128, tmp_path)
    return Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


def sentencepiece(pieces: dict[str, float], **more: Any) -> dict[str, Any]:
    """The values of a SentencePiece vocabulary: control tokens, bytes, one user-defined piece, then `pieces`."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, "  ", *pieces]
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": np.array([2, 3, 3, *[6] * 256, 4, *[1] * len(pieces)], dtype=np.int32),
        "scores": np.array([0.0] * 259 + [-1000.0, *pieces.values()], dtype=np.float32),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | more


def join_by_score(text: str, pieces: dict[str, float]) -> list[str]:
    """SentencePiece's algorithm as its paper tells it, slowly: join the neighbours whose union scores best."""
    parts = list(text)
    while True:
        unions = [(-pieces[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in pieces]
        if not unions:
            return parts
        _, i = min(unions)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def random_pieces(rng: random.Random) -> dict[str, float]:
    """A vocabulary in which every piece is the union of two others in exactly one way, as in a trained one mostly."""
    pieces = {letter: -100.0 - i for i, letter in enumerate("abcd▁")}
    while len(pieces) < 40:
        union = rng.choice(list(pieces)) + rng.choice(list(pieces))
        grown = pieces | {union: -rng.uniform(1, 99)}
        if all(sum(p[:i] in grown and p[i:] in grown for i in range(1, len(p))) == (len(p) > 1) for p in grown):
            pieces = grown
    return pieces


def test_merges_from_scores_give_what_sentencepiece_gives(tmp_path: Path):
    """On random vocabularies and texts the tokens are those of the plain algorithm."""
    for seed in range(20):
        rng = random.Random(seed)
        pieces = random_pieces(rng)
        tokenizer = build(tmp_path, **sentencepiece(pieces, add_space_prefix=False, add_bos_token=False))
        for _ in range(50):
            text = "".join(rng.choices("abcd ", weights=[4, 4, 4, 4, 1], k=rng.randrange(1, 30))).replace("  ", " ")
            assert tokenizer.encode(text).tokens == join_by_score(text.replace(" ", "▁"), pieces)


def test_sentencepiece_text_comes_back_whole(tmp_path: Path):
    """Characters outside the vocabulary go through their bytes; spaces, tabs and lines are kept."""
    tokenizer = build(tmp_path, **sentencepiece({"a": -1.0, "▁": -2.0, "▁a": -3.0}, add_space_prefix=False))
    for text in ("a a", " a  a   a ", "日本語 😀 é", "a\n\n\ta", "\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_space_prefix_is_added_once_and_taken_off_again(tmp_path: Path):
    """Llama 2's vocabulary treats the first word like those after a space; the text does not show it."""
    tokenizer = build(tmp_path, **sentencepiece({"a": -1.0, "▁": -2.0, "▁a": -3.0}))
    assert tokenizer.encode("a a").tokens == ["<s>", "▁a", "▁a"]
    assert tokenizer.decode(tokenizer.encode("a a").ids) == "a a"


def test_user_defined_pieces_are_whole_whatever_the_scores_say(tmp_path: Path):
    """Gemma has runs of spaces as pieces; the file stores them with real spaces, the text has marks by then."""
    tokenizer = build(tmp_path, **sentencepiece({"a": -1.0, "▁": -2.0, "▁a": -0.5}, add_space_prefix=False))
    assert tokenizer.encode("a  a").tokens == ["<s>", "a", "▁▁", "a"]
    assert tokenizer.encode("a  a").ids[2] == 259


def test_phi_3_swallows_the_line_break_after_a_special_token(tmp_path: Path):
    """Its template writes one there that the model never saw in training."""
    values = sentencepiece({"a": -1.0, "▁": -2.0, "▁a": -3.0})
    values["tokens"][2] = "<|end|>"
    file = GGUFFile(
        {f"tokenizer.ggml.{key}": value for key, value in values.items()} | {"general.architecture": "phi3"}, {}
    )
    write_tokenizer(file, read_vocabulary(file), 128, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("a<|end|>\n a").ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["<s>", "▁a", "<|end|>", "▁a"]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, ["<s>", "a"]),
        ({"add_bos_token": False}, ["a"]),
        ({"add_eos_token": True}, ["<s>", "a", "</s>"]),
    ],
    ids=["default", "no bos", "eos"],
)
def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path, metadata: dict[str, Any], expected: list[str]):
    """And never when the caller adds them itself, as chat templates do."""
    tokenizer = build(tmp_path, **sentencepiece({"a": -1.0}, add_space_prefix=False, **metadata))
    assert tokenizer.encode("a").tokens == expected
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]
    assert tokenizer.decode(tokenizer.encode("a").ids, skip_special_tokens=True) == "a"


def byte_level(pre: str, words: list[str], merges: list[str], **more: Any) -> dict[str, Any]:
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), *words, "<|endoftext|>", "<tool_call>"]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": np.array([1] * (len(tokens) - 2) + [3, 4], dtype=np.int32),
        "merges": merges,
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 2,
    } | more


TEXT = "I'll pay 12345 €, don't\n\n  WE'RE  naïve日本\t!!\r\nx"
CUTS = {
    "gpt-2": "I|'ll| pay| 12345| €,| don|'t|\n\n | WE|'|RE| | naïve日本|\t|!!|\r|\n|x",
    "qwen2": "I|'ll| pay| |1|2|3|4|5| €,| don|'t|\n\n| | WE|'RE| | naïve日本|\t|!!\r\n|x",
    "llama-bpe": "I|'ll| pay| |123|45| €,| don|'t|\n\n| | WE|'RE| | naïve日本|\t|!!\r\n|x",
    "smollm": "I|'ll| pay| |1|2|3|4|5| €,| don|'t|\n\n | WE|'|RE| | naïve日本|\t|!!|\r|\n|x",
    "gpt-4o": "I'll| pay| |123|45| €,| don't|\n\n| | WE'RE| | naïve日本|\t|!!\r\n|x",
    "tekken": "I|'ll| pay| |1|2|3|4|5| €,| don|'t|\n\n| | WE|'RE| | naïve日本|\t|!!\r\n|x",
}


@pytest.mark.parametrize("pre", CUTS)
def test_words_are_cut_as_the_models_own_tokenizer_cuts_them(pre: str):
    """Contractions, digits, spaces, lines and scripts are where the kinds of pre-tokenizer differ."""
    pieces = [TEXT[start:end] for _, (start, end) in find_pre_tokenizer(pre).build().pre_tokenize_str(TEXT)]
    assert pieces == CUTS[pre].split("|")


def test_qwen_puts_text_into_composed_form_first(tmp_path: Path):
    """An e with a combining accent is the same tokens as the single letter."""
    tokenizer = build(tmp_path, **byte_level("qwen2", ["Ã©"], ["Ã ©"]))
    assert tokenizer.encode("e\u0301").tokens == ["Ã©"]


def test_llama_3_takes_a_known_word_whatever_the_merges_say(tmp_path: Path):
    """`hello` is in the vocabulary but no merge makes it: one token for Llama 3, letters for GPT-2."""
    assert build(tmp_path, **byte_level("llama-bpe", ["hello"], [], add_bos_token=False)).encode("hello").tokens == [
        "hello"
    ]
    assert build(tmp_path, **byte_level("gpt-2", ["hello"], [])).encode("hello").tokens == list("hello")


def test_llama_3_starts_with_bos_unless_the_file_says_no(tmp_path: Path):
    """Some files lack add_bos_token; the pre-tokenizer's family then decides, as in llama.cpp."""
    assert build(tmp_path, **byte_level("llama-bpe", [], [])).encode("a").tokens == ["<|endoftext|>", "a"]
    assert build(tmp_path, **byte_level("qwen2", [], [])).encode("a").tokens == ["a"]


def test_special_tokens_are_whole_and_only_control_tokens_are_hidden(tmp_path: Path):
    """skip_special_tokens drops <|endoftext|> and keeps <tool_call>, which answers must show."""
    tokenizer = build(tmp_path, **byte_level("qwen2", [], []))
    ids = tokenizer.encode("a<|endoftext|>b<tool_call>").ids
    assert len(ids) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<tool_call>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|endoftext|>b<tool_call>"


def test_every_byte_comes_back(tmp_path: Path):
    """Byte-level tokenizers lose nothing, whatever the text."""
    tokenizer = build(tmp_path, **byte_level("gpt-2", [], []))
    text = "".join(map(chr, range(0x500))) + "日本語😀\U0001f469\u200d\U0001f467"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_merges_outside_the_vocabulary_are_refused(tmp_path: Path):
    """A damaged file does not end in a traceback of another library."""
    with pytest.raises(ModelError, match="merges"):
        build(tmp_path, **byte_level("gpt-2", [], ["a b"]))


def test_the_chat_template_and_the_named_tokens_are_written(tmp_path: Path):
    """The web tier reads them from the folder."""
    values = byte_level("qwen2", [], [])
    file = GGUFFile(
        {f"tokenizer.ggml.{key}": value for key, value in values.items()}
        | {"tokenizer.chat_template": "{{ messages }}"},
        {},
    )
    write_tokenizer(file, read_vocabulary(file), 128, tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages }}"
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|endoftext|>"
    assert settings["add_bos_token"] is False
    assert settings["model_max_length"] == 128


def test_a_base_model_has_no_template_file(tmp_path: Path):
    """Nothing is made up for a model without a chat template."""
    build(tmp_path, **byte_level("qwen2", [], []))
    assert not (tmp_path / "chat_template.jinja").exists()


def test_end_tokens_are_those_named_and_those_known(tmp_path: Path):
    """eos, eot and eom of the file, and well-known names among special tokens, but no ordinary word of such a name."""
    values = byte_level("qwen2", ["<EOT>"], [], eot_token_id=5, eom_token_id=9999)
    file = GGUFFile({f"tokenizer.ggml.{key}": value for key, value in values.items()}, {})
    assert read_vocabulary(file).end_token_ids() == [5, values["tokens"].index("<|endoftext|>")]
