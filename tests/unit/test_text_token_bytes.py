"""The bytes of single tokens: joined they are the bytes of the text, for each kind of vocabulary."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.support import tiny_tokenizer
from tests.support.tiny_tokenizer import IM_END
from web.text.token_bytes import TokenBytes

BYTE_LEVEL = tiny_tokenizer.build()


def byte_fallback() -> Tokenizer:
    """A SentencePiece-like vocabulary: words with ▁ for the space, and bytes for what it has no piece for."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁hi", "hi"]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [("h", "i"), ("▁", "hi")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    decoder = tokenizer.decoder
    return TokenBytes(tokenizer, json.loads(decoder.__getstate__()) if decoder else None)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20))
def test_byte_level(text):
    """Whatever the text, emoji and control characters included."""
    found = token_bytes(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    assert b"".join(found.of(token_id) for token_id in ids) == text.encode()


@pytest.mark.parametrize("text", ["hi hi", "hi 😀", "你hi", "\x00 <0x41>"])
def test_byte_fallback(text):
    tokenizer = byte_fallback()
    found = token_bytes(tokenizer)
    ids = tokenizer.encode(text.replace(" ", "▁")).ids
    assert b"".join(found.of(token_id) for token_id in ids) == text.encode()


def test_added_tokens_are_their_own_text():
    found = token_bytes(BYTE_LEVEL)
    assert found.of(BYTE_LEVEL.token_to_id(IM_END)) == IM_END.encode()


def test_ids_beyond_the_vocabulary_have_no_bytes():
    """Models pad their vocabulary; such a token can be among the likeliest."""
    assert token_bytes(BYTE_LEVEL).of(10**6) == b""


def test_a_vocabulary_of_words():
    tokenizer = Tokenizer(models.WordLevel({"hi": 0, "you": 1}, unk_token="hi"))
    assert [token_bytes(tokenizer).of(token_id) for token_id in (0, 1)] == [b"hi", b"you"]
