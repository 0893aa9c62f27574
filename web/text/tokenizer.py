"""The model's tokenizer: text to token ids and back.

Loaded from a folder with tokenizer.json, by the `tokenizers` library alone. One object serves all threads of a process.

Control tokens. What a user writes is text: "<|im_end|>" in a message must not end the message. So `encode_parts` takes
the template's output in which the user's own words are marked (see `Guard`), and encodes the control tokens that the
template wrote as such, and the same letters in the user's words as letters. It uses a twin of the tokenizer that
matches no control token but has a stand-in for each, spelled so that nobody can guess it. A raw completion prompt, in
contrast, may hold control tokens: its author writes the template himself.
"""

import json
import re
import secrets
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from web.text.offload import offload
from web.text.token_bytes import TokenBytes

OFFLOAD_CHARACTERS = 2048
"""Shorter texts are encoded at once: that takes less time than the way to another thread and back."""


class TextTokenizer:
    """See the module. path: a folder. Raises OSError or ValueError when it holds no usable tokenizer."""

    def __init__(self, path: Path):
        self._file = path / "tokenizer.json"
        self._tokenizer = _load(self._file)
        config = _read_json(path / "tokenizer_config.json")
        self.named_tokens = {
            name: text
            for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
            if (text := _token_text(config.get(name))) is not None
        }
        """The tokens that a chat template may name, such as bos_token, as text."""
        added: dict[int, AddedToken] = self._tokenizer.get_added_tokens_decoder()
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}
        self._special_ids = frozenset(self._special.values())
        self._added_special = [token for token in added.values() if token.special]
        # Such tokens are matched after normalisation, so that other letters may become one: always guard then.
        self._spelled_in_many_ways = any(token.normalized for token in self._added_special)
        self._prefix = self._leading_tokens()
        decoder = self._tokenizer.decoder
        self.token_bytes = TokenBytes(self._tokenizer, json.loads(decoder.__getstate__()) if decoder else None)
        self._twin = _Twin(self._file, self._added_special)
        self.guard = Guard(list(self._special))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens, which are never part of the answer's text."""
        return self._special_ids

    def special_id(self, text: str) -> int | None:
        """Return the id of the control token that is written like this, or None."""
        return self._special.get(text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text in which control tokens count as such, behind the tokenizer's BOS, once."""
        return self._with_prefix(self.encode_bare(text))

    def encode_bare(self, text: str) -> list[int]:
        """Return the same without the BOS."""
        return self._encode(text) if len(text) < OFFLOAD_CHARACTERS else offload(self._encode, text)

    def exceeds(self, text: str, num_tokens: int) -> bool:
        """Whether a text has certainly more than so many tokens, looking no further into it than needed to know.

        False says nothing. The beginning of a text can have more tokens than the same letters in the whole, but not
        twice as many.
        """
        length = 8 * num_tokens  # of ordinary text that is about twice as many tokens
        while length < len(text):
            if len(offload(self._encode, text[:length])) > 2 * num_tokens:
                return True
            length *= 2
        return False

    def encode_guarded(self, text: str) -> list[int]:
        """Return the ids of a template's output whose user text went through `guard.hide`; BOS stands there once."""
        if not (self._spelled_in_many_ways or self.guard.needed(text)):
            return self.encode(text)
        return self._with_prefix(offload(self._twin.encode, self.guard, text))

    def decode(self, ids: list[int]) -> str:
        """Return the text of some ids, control tokens among them."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def last_token(self, text: str) -> int:
        """Return the token with which a text ends when it stands behind a letter."""
        return self._encode("a" + text)[-1]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _with_prefix(self, ids: list[int]) -> list[int]:
        return ids if ids[: len(self._prefix)] == self._prefix else self._prefix + ids

    def _leading_tokens(self) -> list[int]:
        """Return the ids that the tokenizer itself puts before a text; what it puts behind is for other tasks."""
        alone = self._encode("a")
        whole: list[int] = self._tokenizer.encode("a", add_special_tokens=True).ids
        return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(alone)] == alone), [])


class Guard:
    """Marks control tokens' letters in user text, so that a chat template's own can be told from them.

    The marks hold random digits made in this process: no text can contain them by intent or accident.
    """

    def __init__(self, special: list[str]):
        self._key = secrets.token_hex(8)
        self.special = special
        self._index = {text: index for index, text in enumerate(self.special)}
        mark = f"\ue000{self._key}u([0-9]+)\ue001"
        self._written = re.compile(_one_of(special)) if special else None
        self._any = re.compile(f"{mark}|{_one_of(special)}" if special else mark)

    def hide(self, text: str) -> str:
        """Return user text with a mark in place of everything that is written like a control token."""
        if self._written is None:
            return text
        return self._written.sub(lambda match: f"\ue000{self._key}u{self._index[match[0]]}\ue001", text)

    def needed(self, text: str) -> bool:
        """Whether a template's output has marks in it."""
        return self._key in text

    def stand_in(self, index: int) -> str:
        """Return what stands for a control token of the template."""
        return f"\ue000{self._key}t{index}\ue001"

    def reveal(self, text: str) -> str:
        """Return the text with user text as it was, and a stand-in for each control token of the template."""

        def replace(match: re.Match[str]) -> str:
            return self.special[int(match[1])] if match[1] else self.stand_in(self._index[match[0]])

        return self._any.sub(replace, text)


class _Twin:
    """A second tokenizer that takes control tokens for text and knows their stand-ins. Loaded when first needed."""

    def __init__(self, file: Path, special: list[AddedToken]):
        self._file = file
        self._special = {token.content: token for token in special}
        self._built: tuple[Tokenizer, dict[int, int]] | None = None

    def encode(self, guard: Guard, text: str) -> list[int]:
        """Return the ids of a guarded text, without BOS."""
        # Without a lock: two threads that come first may both build it, and either result will do.
        tokenizer, real_ids = self._built = self._built or self._build(guard)
        ids = tokenizer.encode(guard.reveal(text), add_special_tokens=False).ids
        return [real_ids.get(token_id, token_id) for token_id in ids]

    def _build(self, guard: Guard) -> tuple[Tokenizer, dict[int, int]]:
        """Return the tokenizer, and the id of the control token behind the id of each stand-in."""
        tokenizer = _load(self._file)
        tokenizer.encode_special_tokens = True
        stand_ins = [self._stand_in(guard, index, text) for index, text in enumerate(guard.special)]
        tokenizer.add_tokens(stand_ins)
        return tokenizer, {
            _id_of(tokenizer, stand_in.content): _id_of(tokenizer, text)
            for stand_in, text in zip(stand_ins, guard.special, strict=True)
        }

    def _stand_in(self, guard: Guard, index: int, text: str) -> AddedToken:
        token = self._special[text]
        return AddedToken(
            guard.stand_in(index), lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False
        )


def _one_of(words: list[str]) -> str:
    """Return a pattern for the longest of some words that stands at a place.

    Words share their beginnings in it, so that thousands of them (Gemma has 6,000) are not tried one by one.
    """
    by_first: dict[str, list[str]] = {}
    for word in words:
        by_first.setdefault(word[:1], []).append(word[1:])
    may_end = by_first.pop("", None) is not None
    branches = [re.escape(first) + _one_of(rest) for first, rest in by_first.items()]
    if len(branches) == 1 and not may_end:
        return branches[0]
    return f"(?:{'|'.join(branches)})" + "?" * may_end if branches else ""


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id: int | None = tokenizer.token_to_id(token)
    if token_id is None:
        raise ValueError(f"the tokenizer lost its token {token!r}")
    return token_id


def _load(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  the library raises plain Exception for everything
        raise ValueError(f"{file.name} is not usable: {error}") from None
    # A tokenizer.json may ask for both; a prompt must be whole and alone.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    value = json.loads(file.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json, which is a string or a map."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
