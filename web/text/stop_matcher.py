"""Finds stop strings in an answer that arrives in pieces.

The pieces' borders do not matter: the string that is complete first wins (of two complete at once the longer), and the
text is cut before it. No text is held back but that which a stop string may begin with. Knuth, Morris and Pratt's
automaton for each string, so the work for a character does not grow with the strings' length.
"""


class StopMatcher:
    """Watches the text of one answer. stops: the strings, none of them empty. keep: whether the one found is kept."""

    def __init__(self, stops: list[str], keep: bool = False):
        self._stops = stops
        self._keep = keep
        self._fallbacks = [_fallbacks(stop) for stop in stops]
        self._matched = [0] * len(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Return the text that can go out now. Once `stopped` is True, the rest of the answer is not wanted."""
        if self.stopped:
            return ""
        held = self._held + text
        start = len(held) - len(text)
        for at, character in enumerate(text, start + 1):
            found = self._advance(character)
            if found:
                self.stopped = True
                self._held = ""
                return held[:at] if self._keep else held[: at - found]
        keep = len(held) - max(self._matched, default=0)
        self._held = held[keep:]
        return held[:keep]

    def flush(self) -> str:
        """Return what is still held back when the answer has ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Take one character; return the length of the stop string that it completes, or 0."""
        found = 0
        for index, stop in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = self._fallbacks[index][matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                found = max(found, matched)
            self._matched[index] = matched
        return found


def _fallbacks(stop: str) -> list[int]:
    """Return, for each prefix of the string, the length of its longest proper prefix that is also its suffix."""
    fallbacks = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[at] != stop[length]:
            length = fallbacks[length - 1]
        if stop[at] == stop[length]:
            length += 1
        fallbacks[at] = length
    return fallbacks
