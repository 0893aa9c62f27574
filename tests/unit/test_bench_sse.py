"""The SSE parser: framing must not depend on how the network cuts the bytes."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cli.bench.sse import SSEEvent, SSEParser

STREAM = (
    b': ping\r\n\r\ndata: {"a": 1}\r\n\r\nevent: error\ndata:no space\ndata:  two\n\n'
    b"id: 7\nretry: 1\n\ndata: h\xc3\xa9\xe6\xbc\xa2\xf0\x9f\x98\x80\r\rdata\n\ndata: [DONE]\n\n"
)
EVENTS = [
    SSEEvent("", '{"a": 1}'),
    SSEEvent("error", "no space\n two"),
    SSEEvent("", "hé漢😀"),
    SSEEvent("", ""),
    SSEEvent("", "[DONE]"),
]


def parse(pieces: list[bytes]) -> list[SSEEvent]:
    parser = SSEParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_framing_of_the_standard() -> None:
    """Comments and unknown fields vanish, LF, CR and CRLF all end lines, data lines join, one space is stripped."""
    assert parse([STREAM]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    """A read may end inside a line, a CRLF or a UTF-8 character; the events are the same."""
    edges = [0, *sorted(cuts), len(STREAM)]
    assert parse([STREAM[a:b] for a, b in itertools.pairwise(edges)]) == EVENTS


def test_byte_by_byte() -> None:
    assert parse([STREAM[i : i + 1] for i in range(len(STREAM))]) == EVENTS


def test_event_is_delivered_as_soon_as_its_blank_line_is_there() -> None:
    """Time to first token must not wait for the next event."""
    parser = SSEParser()
    assert parser.feed(b"data: x\n") == []
    assert parser.feed(b"\n") == [SSEEvent("", "x")]
    assert parser.feed(b"data: y\r\n\r\n") == [SSEEvent("", "y")]


def test_byte_order_mark_is_skipped_even_when_split() -> None:
    assert parse([b"\xef", b"\xbb\xbfdata: x\n\n"]) == [SSEEvent("", "x")]


def test_truncated_tells_a_cut_event_from_a_clean_end() -> None:
    """An event without its blank line is never delivered, and the reader can know that it was cut."""
    parser = SSEParser()
    parser.feed(b"data: x\n\n")
    assert not parser.truncated
    assert parser.feed(b"data: [DONE]\n") == []
    assert parser.truncated
    parser.feed(b"\n")
    assert not parser.truncated
    parser.feed(b"dat")
    assert parser.truncated
