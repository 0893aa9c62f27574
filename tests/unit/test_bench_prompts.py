"""Synthetic prompts: exact length, unique, reproducible."""

import itertools
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from cli.bench.prompts import TokenPrompts, WordPrompts

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def build_tokenizer(folder: Path, words: int) -> Path:
    """A byte-level BPE with that many three-letter words as single tokens, and a BOS that encoding adds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", *alphabet])}
    merges = []
    for a, b, c in itertools.islice(itertools.product(LETTERS, repeat=3), 0, words * 7, 7):
        for left, right in ((a, b), (a + b, c), ("Ġ", a + b + c)):
            if left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("special_tokens", [False, True])
def test_token_prompts_have_exactly_the_length_asked(tmp_path: Path, special_tokens: bool) -> None:
    """Counted by the tokenizer, with the BOS it adds where the endpoint adds it."""
    folder = build_tokenizer(tmp_path, 300)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for length in (2, 17, 128):
        prompts = TokenPrompts(folder, length, special_tokens=special_tokens)
        for index in (-1, 0, 5):
            assert len(tokenizer.encode(prompts.prompt(index), add_special_tokens=special_tokens).ids) == length


def test_token_prompts_share_only_the_prefix_asked(tmp_path: Path) -> None:
    folder = build_tokenizer(tmp_path, 300)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = TokenPrompts(folder, 64, shared_prefix=40)
    ids = [tokenizer.encode(prompts.prompt(i), add_special_tokens=False).ids for i in range(8)]
    assert {len(i) for i in ids} == {64}
    assert len({tuple(i[:40]) for i in ids}) == 1
    assert len({tuple(i[40:48]) for i in ids}) == 8


def test_a_tokenizer_without_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="words of one token"):
        TokenPrompts(build_tokenizer(tmp_path, 5), 16)


def test_word_prompts_are_exact_unique_and_seeded() -> None:
    prompts = [WordPrompts(50, seed=3).prompt(i) for i in range(100)]
    assert {len(p.split()) for p in prompts} == {50}
    assert len({tuple(p.split()[:8]) for p in prompts}) == 100
    assert prompts == [WordPrompts(50, seed=3).prompt(i) for i in range(100)]
    assert prompts[0] != WordPrompts(50, seed=4).prompt(0)


def test_word_prompts_share_only_the_prefix_asked() -> None:
    prompts = [WordPrompts(50, shared_prefix=20).prompt(i).split() for i in range(20)]
    assert {len(p) for p in prompts} == {50}
    assert len({tuple(p[:20]) for p in prompts}) == 1
    assert len({tuple(p[20:28]) for p in prompts}) == 20


@pytest.mark.parametrize("shared", [-1, 50, 51])
def test_a_prefix_as_long_as_the_prompt_is_refused(shared: int) -> None:
    """Requests would all be the same, and the prefix cache would answer."""
    with pytest.raises(ValueError, match="shared prefix"):
        WordPrompts(50, shared_prefix=shared)
