"""Synthetic prompts: as long as asked, different for every request, the same for the same seed.

Pure but for reading the tokenizer's file. Prompts of different requests share nothing but what `shared_prefix` asks
for, so that a server's prefix cache does not flatter it.
"""

import random
from pathlib import Path
from typing import Protocol

WORD_STARTS = ("Ġ", "▁")
MIN_WORDS = 64
MAX_ATTEMPTS = 20


class PromptSource(Protocol):
    """Gives request `index` its prompt."""

    def prompt(self, index: int) -> str:
        """The prompt text; the same for the same index."""


class WordPrompts:
    """Prompts of exactly `length` made-up words, of which the first `shared_prefix` are the same for all requests."""

    def __init__(self, length: int, shared_prefix: int = 0, seed: int = 0):
        _check_lengths(length, shared_prefix)
        self._seed, self._own = seed, length - shared_prefix
        self._shared = _made_up_words(random.Random(f"{seed}/shared"), shared_prefix)

    def prompt(self, index: int) -> str:
        """Words joined by single spaces."""
        return " ".join(self._shared + _made_up_words(random.Random(f"{self._seed}/{index}"), self._own))


class TokenPrompts:
    """Prompts of exactly `length` tokens of one tokenizer, of which the first `shared_prefix` are the same for all.

    Built from words that are one token each and checked by encoding the whole. With `special_tokens` the tokens that
    the tokenizer itself adds (a BOS) count too: right for `/v1/completions`. A chat template's tokens never count.
    """

    def __init__(self, folder: Path, length: int, shared_prefix: int = 0, seed: int = 0, special_tokens: bool = False):
        """Reads `folder`/tokenizer.json. Raises ValueError for a tokenizer without enough one-token words."""
        from tokenizers import Tokenizer

        _check_lengths(length, shared_prefix)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._length, self._seed, self._special_tokens = length, seed, special_tokens
        self._words = self._one_token_words()
        self._shared = random.Random(f"{seed}/shared").choices(self._words, k=shared_prefix)

    def prompt(self, index: int) -> str:
        """Text that encodes to exactly the length asked. Raises ValueError when the tokenizer allows none."""
        rng = random.Random(f"{self._seed}/{index}")
        number = self._length
        for _ in range(MAX_ATTEMPTS):
            own = rng.choices(self._words, k=max(1, number - len(self._shared)))
            text = " ".join([*self._shared, *own])
            excess = self.count(text) - self._length
            if not excess:
                return text
            number -= excess
        raise ValueError(f"found no prompt of exactly {self._length} tokens with this tokenizer")

    def count(self, text: str) -> int:
        """Number of tokens of `text`, counted as this source counts."""
        return len(self._tokenizer.encode(text, add_special_tokens=self._special_tokens).ids)

    def _one_token_words(self) -> list[str]:
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        words = {token[1:] for token in vocabulary if token.startswith(WORD_STARTS) and _is_plain(token[1:])}
        # One token at the start of a text as well as after a space: a prompt then needs no leading space.
        alone = [w for w in sorted(words) if len(self._tokenizer.encode(w, add_special_tokens=False).ids) == 1]
        if len(alone) < MIN_WORDS:
            raise ValueError(f"the tokenizer has {len(alone)} words of one token; {MIN_WORDS} are needed")
        return alone


def _is_plain(word: str) -> bool:
    return 3 <= len(word) <= 10 and word.isascii() and word.isalpha() and word.islower()


def _made_up_words(rng: random.Random, number: int) -> list[str]:
    return ["".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3)) for _ in range(number)]


def _check_lengths(length: int, shared_prefix: int) -> None:
    if not 0 <= shared_prefix < length:
        raise ValueError(f"the shared prefix ({shared_prefix}) must be shorter than the prompt ({length})")
