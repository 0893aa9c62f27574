"""What `--quantization auto` chooses on the CPU: by measured perplexity, once a model, and never at a start's price."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from tests.support import tiny_tokenizer
from tests.support.tiny_models import packed_model, prompt_of, tiny_model
from worker.activation import align_activations
from worker.linear import pack_linears
from worker.quantization import choose_quantization, describe, perplexity, reference_tokens

CONTEXT = 200


@dataclass
class Loads:
    """Loads tiny models; `noise` is added to the weights of int8 ones."""

    noise: float = 0.0
    kinds: list[str] = field(default_factory=list)

    def __call__(self, kind: str) -> PreTrainedModel:
        self.kinds.append(kind)
        model = tiny_model("llama", attention="paged_torch")
        if kind == "int8":
            torch.manual_seed(0)
            with torch.no_grad():
                for weight in model.parameters():
                    weight += self.noise * torch.randn_like(weight)
        pack_linears(model, kind)
        align_activations(model)
        return model


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model's folder, as far as the choice looks at it."""
    path = tmp_path / "model"
    tiny_tokenizer.write(path, None)
    (path / "model.safetensors").write_bytes(b"weights")
    return path


@pytest.fixture
def choose(folder, tmp_path, monkeypatch):
    """Choose for the folder; the tokens are those of a tiny model's vocabulary."""
    monkeypatch.setattr("worker.quantization.reference_tokens", lambda path: prompt_of(300, seed=3))

    def run(loads: Loads, lines: list[str] | None = None):
        return choose_quantization(
            folder, CONTEXT, tmp_path / "cache", loads, (lines if lines is not None else []).append
        )

    return run


def test_perplexity_is_what_transformers_says():
    """In one piece and with transformers' own attention."""
    tokens = prompt_of(150, seed=1)
    with torch.no_grad():
        logits = tiny_model("llama")(torch.tensor([tokens])).logits[0, :-1]
    exact = float(functional.cross_entropy(logits, torch.tensor(tokens[1:])).exp())
    assert perplexity(packed_model("llama"), tokens) == pytest.approx(exact, rel=1e-4)


def test_int8_where_it_costs_next_to_nothing(choose):
    loads, lines = Loads(), []
    verdict = choose(loads, lines)
    assert verdict.quantization == "int8"
    assert loads.kinds == ["none", "int8"]
    assert verdict.perplexity["int8"] == pytest.approx(verdict.perplexity["none"], rel=0.01)
    assert lines == [f"comparing int8 with float32 on {CONTEXT} tokens, once for this model"]
    assert "linear layers are int8" in describe(verdict)


def test_fp16_where_int8_costs_more_than_a_percent(choose):
    verdict = choose(Loads(noise=0.1))
    assert verdict.quantization == "fp16"
    assert verdict.perplexity["int8"] > 1.01 * verdict.perplexity["none"]
    assert "linear layers are fp16 (int8: perplexity" in describe(verdict)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_later_start_measures_nothing(choose, noise):
    first, again = choose(Loads(noise)), Loads(noise)
    assert choose(again) == first
    assert not again.kinds


def test_another_file_is_another_model(choose, folder):
    choose(Loads())
    (folder / "model.safetensors").write_bytes(b"other weights")
    loads = Loads(noise=0.1)
    assert choose(loads).quantization == "fp16"
    assert loads.kinds


@pytest.mark.parametrize(
    "kept", [b"", b"[]", b"{}", b'{"quantization": "int4"}', b'{"quantization": "int8", "perplexity": 3}', b"\xff\xfe"]
)
def test_a_spoiled_verdict_is_measured_anew(choose, tmp_path, kept):
    choose(Loads())
    [file] = (tmp_path / "cache" / "quantization").iterdir()
    file.write_bytes(kept)
    loads = Loads()
    assert choose(loads).quantization == "int8"
    assert loads.kinds
    assert json.loads(file.read_text())["quantization"] == "int8"


def test_a_cache_that_cannot_be_written_stops_nothing(choose, tmp_path):
    (tmp_path / "cache").write_bytes(b"a file where the folder should be")
    lines: list[str] = []
    assert choose(Loads(), lines).quantization == "int8"
    assert "cannot be kept" in lines[-1]


def test_no_tokenizer_no_judgement(folder, tmp_path):
    (folder / "tokenizer.json").unlink()
    lines: list[str] = []
    loads = Loads()
    verdict = choose_quantization(folder, CONTEXT, tmp_path / "cache", loads, lines.append)
    assert (verdict.quantization, verdict.perplexity, loads.kinds) == ("fp16", {}, [])
    assert "tokenizer.json" in lines[0]
    assert describe(verdict) == "linear layers are fp16"


def test_a_model_that_cannot_be_measured_is_left_to_the_probe(choose):
    """Its error there says what is wrong with it."""

    def fails(kind: str) -> PreTrainedModel:
        raise RuntimeError("no such kernel")

    lines: list[str] = []
    assert choose(fails, lines).quantization == "fp16"
    assert "no such kernel" in lines[-1]


def test_the_reference_text_is_long_enough_to_judge_by(folder):
    tokens = reference_tokens(folder)
    assert len(tokens) > 1000
