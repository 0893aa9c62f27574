"""Stop strings in text that arrives in pieces."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from web.text.stop_matcher import StopMatcher


def run(text: str, stops: list[str], sizes: list[int]) -> tuple[str, bool]:
    """Feed a text in pieces; return what came out and whether it was stopped."""
    matcher, out, at, turn = StopMatcher(stops), "", 0, 0
    while at < len(text) and not matcher.stopped:
        size = sizes[turn % len(sizes)] if sizes else 1
        out += matcher.feed(text[at : at + size])
        at, turn = at + size, turn + 1
    return out + ("" if matcher.stopped else matcher.flush()), matcher.stopped


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The plain definition: the stop string that is complete first wins, of two at once the longer."""
    for end in range(1, len(text) + 1):
        found = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(found)], True
    return text, False


AB = st.text("ab", min_size=1, max_size=5)


@settings(max_examples=1000, deadline=None)
@given(st.text("ab", max_size=30), st.lists(AB, min_size=1, max_size=4), st.lists(st.integers(1, 6), max_size=6))
@example("aab", ["ab"], [1])
@example("abcabd", ["abd"], [2])
@example("xabcd", ["bcd", "c"], [9])
def test_as_defined_whatever_the_pieces(text, stops, sizes):
    """Token borders change nothing: the text before the first complete stop string comes out, and nothing of it."""
    assert run(text, stops, sizes) == reference(text, stops)


@settings(max_examples=300, deadline=None)
@given(st.text("ab", max_size=30), st.lists(AB, min_size=1, max_size=4), st.integers(1, 4))
def test_the_stop_string_can_be_kept(text, stops, size):
    """Then it is the end of what comes out."""
    matcher, out = StopMatcher(stops, keep=True), ""
    for at in range(0, len(text), size):
        out += matcher.feed(text[at : at + size])
    out += matcher.flush()
    before, stopped = reference(text, stops)
    assert matcher.stopped == stopped
    assert out == (
        next(text[:end] for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))) if stopped else before
    )


@settings(max_examples=300, deadline=None)
@given(st.text("ab", max_size=20), st.lists(AB, min_size=1, max_size=3))
def test_only_what_may_begin_a_stop_string_is_held_back(text, stops):
    """After each character, what is held is the longest end of the text with which a stop string begins."""
    matcher, out = StopMatcher(stops), ""
    for at, character in enumerate(text, 1):
        out += matcher.feed(character)
        if matcher.stopped:
            return
        seen = text[:at]
        longest = max(
            length
            for length in range(at + 1)
            if any(len(stop) > length and stop.startswith(seen[at - length :]) for stop in stops)
        )
        assert out == seen[: at - longest]


@pytest.mark.parametrize("pieces", [["hel", "lo\n", "\nworld"], ["hello\n\nworld"], list("hello\n\nworld")])
def test_a_stop_string_across_pieces(pieces):
    """No part of "\\n\\n" is seen, however the text was cut."""
    matcher = StopMatcher(["\n\n"])
    assert "".join(matcher.feed(piece) for piece in pieces) == "hello"
    assert matcher.stopped
    assert matcher.feed("more") == ""


def test_long_stop_strings_and_texts_are_quick():
    """The work for a character does not grow with the strings: a megabyte against the worst strings ends soon."""
    stops = ["a" * 1000 + "b", "a" * 999 + "c"]
    out, stopped = run("a" * 200_000, stops, [4])
    assert not stopped
    assert len(out) == 200_000
