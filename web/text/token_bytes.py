"""What a single token stands for, as bytes: half a character has no text of its own.

Works from the pieces of the vocabulary and the kind of decoder that tokenizer.json names. Pure.
"""

import re
from functools import cache
from typing import Any

from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """See the module. decoder: tokenizer.json's, or None."""

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None):
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        steps = _steps(decoder)
        kinds = {step.get("type") for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._replacements = [replacement for step in steps if (replacement := _replacement(step))]

    def of(self, token_id: int) -> bytes:
        """Return a token's bytes; none for an id that the tokenizer does not know."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        piece: str = self._tokenizer.id_to_token(token_id) or ""
        if self._byte_level:
            table = _byte_level_table()
            return b"".join(table.get(character) or character.encode() for character in piece)
        if self._byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return piece.encode()


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return [step for inner in decoder["decoders"] for step in _steps(inner)] if "decoders" in decoder else [decoder]


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    if step.get("type") == "Metaspace":
        return step.get("replacement", "▁"), " "
    if step.get("type") == "Replace" and isinstance(step.get("pattern"), dict) and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return None


@cache
def _byte_level_table() -> dict[str, bytes]:
    """Return the byte for each character of byte-level vocabularies.

    Radford et al., GPT-2, 2019: printable bytes stand for themselves, the others for the characters from 256 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(256 + at): bytes([byte]) for at, byte in enumerate(others)
    }
