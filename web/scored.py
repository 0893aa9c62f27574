"""Which generated tokens, with their log-probabilities, belong to the text that goes out.

Text is held back for stop strings, cut before them, and comes late when a character is spread over several tokens. The
tokens told with a piece of text are those whose text is in it, so that joined they are the answer. Pure.
"""

from dataclasses import dataclass

from common.wire import Logprobs


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer, or of the prompt before it.

    text: what it added to the text: nothing for a control token or half a character at the end, None where it shares a
    character with its neighbours.
    offset: where that begins in the text, in characters. logprobs: None for the first token of a prompt.
    """

    token_id: int
    text: str | None
    offset: int
    logprobs: Logprobs | None


class TokenLedger:
    """The tokens of one answer that are not told yet."""

    def __init__(self) -> None:
        self._unfinished: list[tuple[int, Logprobs | None]] = []
        self._waiting: list[tuple[ScoredToken, int]] = []
        self._decoded = 0
        self._told = 0

    def add_control_token(self, token_id: int, logprobs: Logprobs | None) -> None:
        """Take a token that has no text."""
        self._waiting.append((ScoredToken(token_id, "", self._decoded, logprobs), self._decoded))

    def add(self, token_id: int, logprobs: Logprobs | None, text: str) -> None:
        """Take a token and the text that it settled, before any of that is held back or cut."""
        self._unfinished.append((token_id, logprobs))
        if not text:
            return  # no text, or a part of a character that a later token finishes
        start, self._decoded = self._decoded, self._decoded + len(text)
        alone = len(self._unfinished) == 1
        for each_id, each_logprobs in self._unfinished:
            token = ScoredToken(each_id, text if alone else None, start, each_logprobs)
            self._waiting.append((token, self._decoded))
        self._unfinished = []

    def tell(self, text: str, ended: bool) -> list[ScoredToken]:
        """Return the tokens of the text that goes out now; those of text that is cut are never told."""
        self._told += len(text)
        if ended and self._told > self._decoded and self._unfinished:
            self.add(*self._unfinished.pop(), text[self._decoded - self._told :])
        if ended:  # what the length limit cut off has no text, but it was generated
            for token_id, logprobs in self._unfinished:
                self.add_control_token(token_id, logprobs)
            self._unfinished = []
        told: list[ScoredToken] = []
        while self._waiting:
            token, end = self._waiting[0]
            if end > self._told and not (ended and token.offset < self._told):
                break
            del self._waiting[0]
            if end > self._told and token.text is not None:
                cut = token.text[: self._told - token.offset]
                token = ScoredToken(token.token_id, cut, token.offset, token.logprobs)
            told.append(token)
        return told
