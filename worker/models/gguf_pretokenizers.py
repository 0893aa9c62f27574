"""How text is cut into words before BPE, by the name GGUF gives it (tokenizer.ggml.pre).

The expressions are those the models' own tokenizers use; each is data of the model, in the syntax of `tokenizers`.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from common.errors import ModelError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{tail}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{tail}}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _WORDS.replace("{tail}", "") + r"|\p{N}" + _REST
_GPT4O = _WORDS.replace("{tail}", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"|\p{N}{1,3}" + _REST


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut text: `splits` are expressions applied one after the other, each piece isolated.

    `digits`: every digit is a word of its own, cut first. `nfc`: text is put into that normal form first.
    `ignore_merges`: a word that is in the vocabulary is one token whatever the merges say. `add_bos`: whether a
    sequence starts with BOS when the file does not say.
    """

    splits: tuple[str, ...]
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Return the `tokenizers` object; it ends in the byte-level alphabet."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(split), "isolated") for split in self.splits]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        """Return the normalizer that goes before, or None."""
        return normalizers.NFC() if self.nfc else None


_GPT2_LIKE = PreTokenizer((_GPT2,))
_LLAMA3_LIKE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_LIKE = PreTokenizer((_QWEN2,), nfc=True)
_DIGITS_GPT2 = PreTokenizer((_GPT2,), digits=True)

_BY_NAME = {
    "gpt-2": _GPT2_LIKE,
    "default": _GPT2_LIKE,
    "mpt": _GPT2_LIKE,
    "olmo": _GPT2_LIKE,
    "phi-2": _GPT2_LIKE,
    "llama3": _LLAMA3_LIKE,
    "llama-v3": _LLAMA3_LIKE,
    "llama-bpe": _LLAMA3_LIKE,
    "falcon3": _LLAMA3_LIKE,
    "falcon-h1": _LLAMA3_LIKE,
    "pixtral": _LLAMA3_LIKE,
    "lfm2": _LLAMA3_LIKE,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": _QWEN2_LIKE,
    "deepseek-r1-qwen": _QWEN2_LIKE,
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "stablelm2": PreTokenizer((_QWEN2,)),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "command-r": _DIGITS_GPT2,
    "codeshell": _DIGITS_GPT2,
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "llama4": PreTokenizer((_GPT4O,), add_bos=True),
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        add_bos=True,
    ),
}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """Return the way of cutting called `name`. Raises ModelError when it is not known: a guess would change tokens."""
    found = _BY_NAME.get(name)
    if found is None:
        raise ModelError(f"the GGUF file's pre-tokenizer {name!r} is not known; use the model's safetensors instead")
    return found
