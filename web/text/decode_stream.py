"""Token ids to text, piece by piece, for one answer.

The joined pieces equal the text of all the ids at once. A character whose bytes are spread over several tokens comes
out whole, with its last token; bytes that never become a character come out as U+FFFD, except at the very end of an
answer, where the missing rest may be what the length limit cut off: there they are left out. Control tokens have no
text. One object for one answer; the method is the offset method of text-generation-inference and vLLM: decode a window
that starts at a settled token, with and without what is new, and take the difference.
"""

from collections.abc import Callable

UNFINISHED = "\ufffd"
"""What a decoder gives for bytes that are not, or not yet, a character."""

MAX_PENDING = 3
"""A character has at most four bytes, so at most three tokens wait for its last one."""

MAX_WINDOW = 64
"""Tokens kept at most when none of them gives any text."""


class DecodeStream:
    """See the module. decode: ids to text. special_ids: tokens without text."""

    def __init__(self, decode: Callable[[list[int]], str], special_ids: frozenset[int] = frozenset()):
        self._decode = decode
        self._special_ids = special_ids
        self._ids: list[int] = []
        self._num_settled = 0
        self._settled = ""

    def hides(self, token_id: int) -> bool:
        """Whether a token has no text in the answer."""
        return token_id in self._special_ids

    def step(self, ids: list[int]) -> str:
        """Return the text that these further ids settle; it may be empty."""
        new = [token_id for token_id in ids if token_id not in self._special_ids]
        if not new:
            return ""
        text = self._decode(self._ids + new)
        if text.endswith(UNFINISHED) and len(new) > 1:
            # One by one, so that the text does not depend on how the tokens were put together on their way.
            return "".join(self.step([token_id]) for token_id in new)
        self._ids += new
        return self._settle_part(text) if text.endswith(UNFINISHED) else self._settle(len(self._ids), text)

    def flush(self) -> str:
        """Return what is left at the end of the answer, without the bytes of an unfinished character."""
        return self._decode(self._ids).rstrip(UNFINISHED)[len(self._settled) :]

    def _settle_part(self, text: str) -> str:
        """Settle what stands before the last, unfinished character.

        The last few tokens may still become one. When more than that are pending, they are no character (or the model
        writes U+FFFD itself); they are settled as far as more tokens cannot change them.
        """
        ends = range(len(self._ids) - 1, self._num_settled, -1)
        for end in ends[:MAX_PENDING]:
            part = self._decode(self._ids[:end])
            if not part.endswith(UNFINISHED):
                return self._settle(end, part)
        for end in ends[MAX_PENDING:]:
            part = self._decode(self._ids[:end])
            if text.startswith(part):
                return self._settle(end, part)
        return ""

    def _settle(self, end: int, text: str) -> str:
        delta = text[len(self._settled) :]
        if delta or end > MAX_WINDOW:
            # What was settled now is the start of the next window: some decoders treat a first token differently.
            self._ids = self._ids[self._num_settled :]
            end -= self._num_settled
            self._num_settled = end
            self._settled = self._decode(self._ids[:end])
        return delta
