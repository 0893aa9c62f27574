"""The catalogue's real models after conversion: facts known from their publishers, not from this code."""

import json
import unicodedata
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.config import WorkerConfig, load
from worker.models.catalogue import load_catalogue
from worker.models.gguf_convert import converted_folder
from worker.models.progress import Progress
from worker.models.resolve import resolve_model

QWEN, GEMMA = "qwen2.5-coder-0.5b-instruct", "gemma-3-270m"
TEXTS = [
    "Hello world",
    "  leading, trailing and   inner spaces  ",
    "def f(x):\n    return x ** 2  # comment\n\n\nclass A:\n\tpass\r\n",
    "日本語のテキスト、中文字符、한국어, ไทย, العربية, עברית, हिन्दी",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 🇯🇵 e\u0301 ﬁ Å",
    "1234567890 3.14159 0x1F 1,000,000",
    '{"a": [1, 2, {"b": null}]} <div class="x">&amp;</div>',
    "\x00\x01\x7f\u200b\ufeff\U0010fffd",
    "I'm, you'RE, WE'LL, don't; l'été",
]

pytestmark = pytest.mark.model


def model_folder(name: str) -> Path:
    """The converted folder of a catalogue model; skips when its file is not on disk, never fetches."""
    config = load(WorkerConfig, {"model": name})
    entry = load_catalogue().get(name)
    cache = Path(config.cache_dir)
    here = (cache / "downloads" / entry.file, converted_folder(Path(entry.file), cache, entry.sha256))
    if not any(path.exists() for path in here):
        pytest.skip(f"{name} is not on disk; `tokenloom pull {name}` fetches it")

    def report(progress: Progress) -> None:
        pass

    return resolve_model(config, report).path


@pytest.fixture(scope="module")
def qwen() -> Path:
    return model_folder(QWEN)


@pytest.fixture(scope="module")
def gemma() -> Path:
    return model_folder(GEMMA)


def test_qwen_ids_are_the_published_ones(qwen: Path):
    """Known ids of words, special tokens and tool marks; nothing is put before the text."""
    tokenizer = Tokenizer.from_file(str(qwen / "tokenizer.json"))
    assert tokenizer.encode("Hello world").ids == [9707, 1879]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids == [151644, 872, 198, 6023, 151645]
    known = {"<|endoftext|>": 151643, "<tool_call>": 151657, "</tool_call>": 151658, "<|fim_prefix|>": 151659}
    assert {token: tokenizer.token_to_id(token) for token in known} == known
    hidden = tokenizer.decode([151644, 9707, 151645, 151657], skip_special_tokens=True)
    assert hidden == "Hello<tool_call>"


def test_gemma_ids_are_the_published_ones(gemma: Path):
    """Known ids; BOS goes before a text, and not when the caller says so."""
    tokenizer = Tokenizer.from_file(str(gemma / "tokenizer.json"))
    assert tokenizer.encode("Hello world").ids == [2, 9259, 1902]
    assert tokenizer.encode("Hello world", add_special_tokens=False).ids == [9259, 1902]
    assert tokenizer.encode("<start_of_turn>user\n\n\nhi", add_special_tokens=False).ids == [105, 2364, 109, 2202]
    assert tokenizer.encode("a    b", add_special_tokens=False).ids[1] == 140


@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_text_comes_back_byte_for_byte(name: str, request: pytest.FixtureRequest):
    """Encode, then decode: the same text (for Qwen in its composed form, which its tokenizer asks for)."""
    folder: Path = request.getfixturevalue(name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        expected = unicodedata.normalize("NFC", text) if name == "qwen" else text
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == expected


@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_transformers_reads_the_same_tokenizer(name: str, request: pytest.FixtureRequest):
    """AutoTokenizer may rebuild what it finds: its ids are those of tokenizer.json."""
    folder: Path = request.getfixturevalue(name)
    plain, auto = Tokenizer.from_file(str(folder / "tokenizer.json")), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert auto(text).input_ids == plain.encode(text).ids


@pytest.mark.parametrize(("name", "ends"), [("qwen", [151643, 151645]), ("gemma", [1, 106])])
def test_generation_ends_where_the_publishers_say(name: str, ends: list[int], request: pytest.FixtureRequest):
    """Both end tokens of each model, as in the publishers' generation_config.json."""
    folder: Path = request.getfixturevalue(name)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == ends


def test_qwen_writes_code_when_asked(qwen: Path):
    """Greedy, through the chat template: working code and an end of turn say that weights and template are right."""
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    model = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32)
    message = {"role": "user", "content": "Write a Python function add(a, b). Only the code, no comments."}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=48, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "def add(a, b):\n    return a + b" in tokenizer.decode(output)
    assert output[-1].item() == 151645


def test_gemma_goes_on_with_a_text(gemma: Path):
    """A base model continues: greedy, a plain fact."""
    tokenizer = AutoTokenizer.from_pretrained(gemma)
    model = AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float32)
    output = model.generate(**tokenizer("1, 2, 3, 4, 5,", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(output[0], skip_special_tokens=True).startswith("1, 2, 3, 4, 5, 6, 7")
