"""Log-probabilities in OpenAI's two forms, of chat and of text completions. Pure."""

from typing import Any

from common.wire import Logprobs
from web.scored import ScoredToken
from web.text.token_bytes import TokenBytes


def chat_logprobs(tokens: list[ScoredToken], token_bytes: TokenBytes) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice, or of a chunk of one; control tokens have none."""
    return {"content": [_chat_token(token, token_bytes) for token in tokens if token.text != ""], "refusal": None}


def completion_logprobs(tokens: list[ScoredToken], token_bytes: TokenBytes) -> dict[str, Any]:
    """Return the `logprobs` of a text completion's choice, or of a chunk of one.

    The token itself is among the top ones even if it is not likely; of several with the same text the likeliest counts.
    The first token of a prompt has no log-probability.
    """
    return {
        "tokens": [_text_of(token, token_bytes) for token in tokens],
        "token_logprobs": [token.logprobs and token.logprobs.logprob for token in tokens],
        "top_logprobs": [token.logprobs and _top(token, token.logprobs, token_bytes) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _chat_token(token: ScoredToken, token_bytes: TokenBytes) -> dict[str, Any]:
    told = token.logprobs or Logprobs(0.0)
    own = token_bytes.of(token.token_id) if token.text is None else token.text.encode()
    top = zip(told.top_ids, told.top_logprobs, strict=True)
    return {
        **_entry(own, told.logprob),
        "top_logprobs": [_entry(token_bytes.of(token_id), logprob) for token_id, logprob in top],
    }


def _entry(own: bytes, logprob: float) -> dict[str, Any]:
    return {"token": own.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(own)}


def _top(token: ScoredToken, told: Logprobs, token_bytes: TokenBytes) -> dict[str, float]:
    top = [(_text_of(token, token_bytes), told.logprob)]
    for token_id, logprob in zip(told.top_ids, told.top_logprobs, strict=True):
        if token_id != token.token_id:
            top.append((token_bytes.of(token_id).decode("utf-8", "replace"), logprob))
    found: dict[str, float] = {}
    for text, logprob in sorted(top, key=lambda item: -item[1]):
        found.setdefault(text, logprob)
    return found


def _text_of(token: ScoredToken, token_bytes: TokenBytes) -> str:
    return token_bytes.of(token.token_id).decode("utf-8", "replace") if token.text is None else token.text
