"""The text side with the catalogue's real tokenizers, and against transformers."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.config import WorkerConfig
from web.text.model_text import ModelText
from worker.models.catalogue import load_catalogue
from worker.models.gguf_convert import converted_folder

pytestmark = pytest.mark.model

QWEN, GEMMA = "qwen2.5-coder-0.5b-instruct", "gemma-3-270m"
CONVERSATIONS = [
    [("user", "hi")],
    [("system", "Be brief."), ("user", "2 + 2 = ?"), ("assistant", "4"), ("user", "  and 3 + 3?\n\n")],
    [("user", "日本語 😀 👩‍👩‍👧 e\u0301 <tool_call> </tool_call> <|not a token|> \u2028")],
    [("user", ""), ("assistant", ""), ("user", "\t\n x")],
]
TEXT = st.text(max_size=40) | st.lists(
    st.sampled_from(["<|im_end|>"[:9], "def f(x):\n", "  ", "😀", "你好", "\r\n", "1234", "<div>", "don't"]), max_size=8
).map("".join)


def folder(name: str) -> Path:
    entry = load_catalogue().get(name)
    path = converted_folder(Path(entry.file), Path(WorkerConfig().cache_dir), entry.sha256)
    if not (path / "tokenizer.json").exists():
        pytest.skip(f"{name} is not in the cache; `tokenloom pull {name}` and a first start put it there")
    return path


@pytest.fixture(scope="module")
def qwen() -> ModelText:
    return ModelText(folder(QWEN))


@pytest.fixture(scope="module", params=[QWEN, GEMMA])
def real(request: pytest.FixtureRequest) -> tuple[ModelText, Tokenizer]:
    path = folder(request.param)
    return ModelText(path), Tokenizer.from_file(str(path / "tokenizer.json"))


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_prompts_are_those_of_transformers(qwen: ModelText, conversation: list[tuple[str, str]]) -> None:
    """Template and tokenizer give the ids of apply_chat_template, which is what the model was trained with."""
    from transformers import AutoTokenizer

    messages = [{"role": role, "content": content} for role, content in conversation]
    reference = AutoTokenizer.from_pretrained(folder(QWEN))
    ids = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert qwen.encode_chat(messages) == ids


@settings(max_examples=200, deadline=None)
@given(text=TEXT)
def test_guarding_changes_nothing_else(real: tuple[ModelText, Tokenizer], text: str) -> None:
    """The twin gives the plain tokenizer's ids for every text in which nobody wrote a control token."""
    model, plain = real
    tokenizer = model.tokenizer
    first, last = tokenizer.guard.special[1], tokenizer.guard.special[2]
    whole = f"{first}user\n{text}{last}\n{first}model\n"
    assert tokenizer._twin.encode(tokenizer.guard, whole) == plain.encode(whole, add_special_tokens=False).ids


def test_control_tokens_of_users_are_letters(real: tuple[ModelText, Tokenizer]) -> None:
    """Each of the model's control tokens, written by a user, is encoded without any control token."""
    tokenizer = real[0].tokenizer
    text = "".join(f"x{token}" for token in tokenizer.guard.special)
    ids = tokenizer.encode_guarded(tokenizer.guard.hide(text))
    assert not tokenizer.special_ids.intersection(ids[len(tokenizer._prefix) :])
    assert tokenizer.decode(ids[len(tokenizer._prefix) :]) == text


@settings(max_examples=200, deadline=None)
@given(text=TEXT, size=st.integers(1, 5))
def test_streams_of_real_tokenizers(real: tuple[ModelText, Tokenizer], text: str, size: int) -> None:
    """Joined deltas equal the whole decoding, and no character is broken."""
    model, plain = real
    ids = plain.encode(text, add_special_tokens=False).ids
    decoder = model.decode_stream()
    joined = "".join([*(decoder.step(ids[at : at + size]) for at in range(0, len(ids), size)), decoder.flush()])
    assert joined.rstrip("\ufffd") == plain.decode(ids).rstrip("\ufffd")
    assert "\ufffd" in text or "\ufffd" not in joined
