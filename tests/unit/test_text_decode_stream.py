"""Ids to text in pieces: the pieces joined equal the whole, characters come out whole."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.support import tiny_tokenizer
from tests.support.tiny_tokenizer import IM_END
from web.text.decode_stream import MAX_WINDOW, DecodeStream

TOKENIZER = tiny_tokenizer.build()
SPECIAL_IDS = frozenset(TOKENIZER.get_added_tokens_decoder())
NUM_TOKENS = TOKENIZER.get_vocab_size()


def decode(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def stream(ids: list[int], sizes: list[int]) -> list[str]:
    """Decode in pieces of these sizes, the last repeated; return the deltas, flush last."""
    decoder = DecodeStream(decode, SPECIAL_IDS)
    deltas, at = [], 0
    sizes = sizes or [1]
    for number in range(len(ids)):
        size = sizes[min(number, len(sizes) - 1)]
        if at >= len(ids):
            break
        deltas.append(decoder.step(ids[at : at + size]))
        at += size
    return [*deltas, decoder.flush()]


SIZES = st.lists(st.integers(1, 7), max_size=20)


def check(ids: list[int], sizes: list[int]) -> None:
    """The joined deltas are the whole decoding but for the unfinished end, whatever the pieces."""
    joined, whole = "".join(stream(ids, sizes)), decode(ids)
    assert whole.startswith(joined)
    assert set(whole[len(joined) :]) <= {"\ufffd"}
    assert joined == "".join(stream(ids, [1]))


@settings(max_examples=400, deadline=None)
@given(st.text(max_size=50), SIZES)
@example("naïve 😀👩‍👩‍👧 你好 \u2028 end", [1])
@example("a\ufffdb\ufffd\ufffd\ufffd\ufffd\ufffd\ufffdc", [1])
def test_joined_deltas_equal_the_text(text, sizes):
    """Emoji and CJK, whose bytes are spread over tokens, come out whole whatever the pieces are."""
    ids = TOKENIZER.encode(text).ids
    deltas = stream(ids, sizes)
    check(ids, sizes)
    assert "".join(deltas).rstrip("\ufffd") == text.rstrip("\ufffd")
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, NUM_TOKENS - 1), max_size=60), SIZES)
def test_any_ids_at_all(ids, sizes):
    """A model may give any ids, also ones that are no text: the joined deltas still equal the whole decoding."""
    check(ids, sizes)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(TOKENIZER.encode("é😀你\xff").ids), max_size=40), SIZES)
def test_broken_characters(ids, sizes):
    """Bytes that never become characters do not wait for ever, and do not spoil what follows."""
    check(ids, sizes)


def test_text_is_not_held_back():
    """A finished character goes out with the token that finishes it."""
    ids = TOKENIZER.encode("😀a").ids
    assert len(ids) == 5
    decoder = DecodeStream(decode)
    assert [decoder.step([token_id]) for token_id in ids] == ["", "", "", "😀", "a"]


def test_what_the_length_limit_cuts_off_is_left_out():
    """An answer that ends in the middle of a character ends before it, without U+FFFD."""
    assert "".join(stream(TOKENIZER.encode("ok 😀").ids[:-1], [1])) == "ok "


def test_control_tokens_have_no_text():
    """<|im_end|> is not part of the answer."""
    ids = [*TOKENIZER.encode("yes").ids, TOKENIZER.token_to_id(IM_END), *TOKENIZER.encode(" no").ids]
    assert "".join(stream(ids, [1])) == "yes no"


def test_endless_broken_bytes_cost_no_more_and_more():
    """The window that is decoded again stays small, whatever the model writes."""
    sizes: list[int] = []

    def measured(ids: list[int]) -> str:
        sizes.append(len(ids))
        return decode(ids)

    decoder = DecodeStream(measured, SPECIAL_IDS)
    lone = TOKENIZER.encode("😀").ids[1]
    text = "".join(decoder.step([lone]) for _ in range(2000)) + decoder.flush()
    assert max(sizes) < 20
    assert set(text) == {"\ufffd"}


def test_endless_ids_without_text_cost_no_more_and_more():
    """The same for ids that the tokenizer does not know, which a model with a padded vocabulary can give."""
    sizes: list[int] = []

    def measured(ids: list[int]) -> str:
        sizes.append(len(ids))
        return decode(ids)

    decoder = DecodeStream(measured, SPECIAL_IDS)
    for _ in range(1000):
        assert decoder.step([NUM_TOKENS + 7]) == ""
    assert max(sizes) <= 2 * MAX_WINDOW + 2


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """A tokenizer like Llama's: words with ▁ for the space, and a token for every byte."""
    words = ["▁hello", "▁world", "lo", "▁"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + at for at, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["hello", "world", "lo", "😀", "你", "é"]), max_size=12), SIZES)
def test_sentencepiece_tokenizers(byte_fallback, words, sizes):
    """Spaces between words survive, and the one before the first word goes, as in the whole decoding."""
    ids: list[int] = []
    for word in words:
        known = byte_fallback.token_to_id("▁" + word) or byte_fallback.token_to_id(word)
        ids += [known] if known is not None else list(word.encode())
    decoder = DecodeStream(byte_fallback.decode)
    deltas, at = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        deltas.append(decoder.step(ids[at : at + size]))
        at += size
    joined = "".join([*deltas, decoder.flush()])
    assert joined == byte_fallback.decode(ids)
    assert "\ufffd" not in joined
