"""lm-eval's local-completions: loglikelihoods are those that transformers computes in process."""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.clients.conftest import TinyServer
from tests.support.client_env import client_python
from tests.support.tiny_tokenizer import IM_END

pytestmark = pytest.mark.timeout(1200)

REQUIREMENTS = ["lm_eval[api]==0.4.13", "transformers"]
TOLERANCE = 1e-3

TASK = """
task: tokenloom_words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""


def documents() -> list[dict[str, Any]]:
    """Questions with choices of different lengths, emoji and CJK among them."""
    chooser, words = random.Random(0), ["hello", "world", "quick", "fox", "42", "😀", "你好", "naïve", "a-b", "x = 1"]
    made = []
    for number in range(12):
        question = " ".join(chooser.choices(words, k=3 + number))
        choices = [" " + " ".join(chooser.choices(words, k=1 + at)) for at in range(4)]
        made.append({"question": question, "choices": choices, "answer": number % 4})
    return made


def exact_loglikelihood(model: Any, tokenizer: Tokenizer, context: str, continuation: str) -> float:
    """Return the sum of the log-probabilities of the continuation's tokens."""
    whole = tokenizer.encode(context + continuation).ids
    first = len(tokenizer.encode(context).ids)
    with torch.no_grad():
        logprobs = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    return float(sum(logprobs[at - 1, whole[at]] for at in range(first, len(whole))))


def plain_tokenizer(server: TinyServer, folder: Path) -> Path:
    """Write the model's tokenizer as transformers' general class wants it, and return the folder."""
    folder.mkdir()
    shutil.copy(server.folder / "tokenizer.json", folder)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": IM_END, "model_max_length": 4096}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def run_lm_eval(server: TinyServer, folder: Path) -> list[dict[str, Any]]:
    """Run the task and return the logged samples."""
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, documents())), encoding="utf-8")
    (folder / "task.yaml").write_text(TASK.format(file=folder / "documents.jsonl"), encoding="utf-8")
    arguments = {
        "model": server.model,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": str(plain_tokenizer(server, folder / "tokenizer")),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
    }
    command = [str(client_python("lm-eval", REQUIREMENTS)), "-m", "lm_eval", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--tasks", "tokenloom_words", "--include_path", str(folder), "--output_path", str(folder / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    done = subprocess.run(
        [*command, "--log_samples"], env=os.environ | offline, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    [samples] = (folder / "out").rglob("samples_*.jsonl")
    return [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]


def test_loglikelihoods_are_those_of_transformers(tiny_server: TinyServer, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_server.folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(tiny_server.folder / "tokenizer.json"))
    samples = run_lm_eval(tiny_server, tmp_path)
    assert len(samples) == len(documents())
    largest = 0.0
    for sample in samples:
        document = sample["doc"]
        for choice, [response] in zip(document["choices"], sample["resps"], strict=True):
            exact = exact_loglikelihood(model, tokenizer, document["question"], choice)
            largest = max(largest, abs(float(response[0]) - exact))
    print(f"largest difference of {4 * len(samples)} loglikelihoods: {largest:.2e}")
    assert largest < TOLERANCE
