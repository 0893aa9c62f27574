"""What `--quantization auto` means for a model on the CPU: int8, if it costs the model next to nothing, and else fp16.

The perplexity of a text that ships with the project is measured in float32 and in int8, once for each model, and the
verdict is kept in the cache folder. Runs in the thread that starts the worker.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import PreTrainedModel

from common.params import SamplingParams
from worker.batch import Scheduled, build_batch
from worker.linear import HAS_VNNI
from worker.request import RequestState
from worker.runner import TorchRunner

RECIPE = 1
"""Goes up with every change of what int8 computes or of how it is judged: old verdicts no longer count then."""

MAX_LOSS = 0.01
"""How much larger int8's perplexity may be, as a share of float32's."""

REFERENCE_TEXT = Path(__file__).with_name("reference_text.txt")
"""Prose, code, dialogue and other languages, written for this purpose: about 1,000 tokens."""

_CHUNK_TOKENS = 64
_BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Verdict:
    """The quantization to use, and the perplexity of each kind that was measured (by its name in worker.linear)."""

    quantization: str
    perplexity: dict[str, float] = field(default_factory=dict)


def choose_quantization(
    path: Path,
    max_model_len: int,
    cache_dir: Path,
    load: Callable[[str], PreTrainedModel],
    report: Callable[[str], None],
) -> Verdict:
    """Return the verdict on the model in folder `path`; `load` loads it with its linear layers packed as it is told.

    Takes two loads and two passes over the text (its first max_model_len tokens) the first time. `report` takes lines
    for the log.
    """
    file = cache_dir / "quantization" / f"{path.name}-{_fingerprint(path)}.json"
    verdict = _recall(file)
    if verdict is not None:
        return verdict
    tokens = reference_tokens(path)[:max_model_len]
    if len(tokens) < 2:
        report("int8 cannot be judged without a tokenizer.json; linear layers are fp16")
        return Verdict("fp16")
    report(f"comparing int8 with float32 on {len(tokens)} tokens, once for this model")
    try:
        exact = perplexity(load("none"), tokens)
        found = perplexity(load("int8"), tokens)
    except Exception as error:  # noqa: BLE001 - whatever a model does that we do not know; the probe will say it better
        report(f"int8 cannot be judged ({error}); linear layers are fp16")
        return Verdict("fp16")
    verdict = Verdict("int8" if found <= exact * (1 + MAX_LOSS) else "fp16", {"none": exact, "int8": found})
    try:
        _keep(file, verdict)
    except OSError as error:
        report(f"the verdict cannot be kept for the next start: {error}")
    return verdict


def describe(verdict: Verdict) -> str:
    """Return a line for the log."""
    if not verdict.perplexity:
        return f"linear layers are {verdict.quantization}"
    exact, found = verdict.perplexity["none"], verdict.perplexity["int8"]
    change = f"perplexity {found:.2f} against {exact:.2f} in float32, {found / exact - 1:+.1%}"
    return f"linear layers are {verdict.quantization} (int8: {change})"


def reference_tokens(path: Path) -> list[int]:
    """Return the reference text in the tokens of the model in folder `path`, or none if it has no usable tokenizer."""
    try:
        ids: list[int] = Tokenizer.from_file(str(path / "tokenizer.json")).encode(REFERENCE_TEXT.read_text("utf-8")).ids
    except Exception:  # noqa: BLE001 - the library raises nothing more precise
        return []
    return ids


def perplexity(model: PreTrainedModel, tokens: list[int]) -> float:
    """Return exp of the mean loss over the tokens after the first."""
    num_blocks = -(-len(tokens) // _BLOCK_SIZE)
    runner = TorchRunner(model, num_blocks, _BLOCK_SIZE)
    request = RequestState("perplexity", tokens, len(tokens), SamplingParams(), 1)
    request.block_table = list(range(num_blocks))
    total = 0.0
    for start in range(0, len(tokens) - 1, _CHUNK_TOKENS):
        length = min(_CHUNK_TOKENS, len(tokens) - 1 - start)
        request.num_computed = start
        with torch.inference_mode():
            logits = runner.forward(build_batch([Scheduled(request, length)], _BLOCK_SIZE), list(range(length)))
            targets = torch.tensor(tokens[start + 1 : start + 1 + length], device=logits.device)
            total += float(functional.cross_entropy(logits, targets, reduction="sum"))
    return math.exp(total / (len(tokens) - 1))


def _fingerprint(path: Path) -> str:
    """Return a digest of what a verdict depends on: the recipe, torch, the processor's kind and the model's files."""
    files = [
        (file.name, stat.st_size, stat.st_mtime_ns)
        for file in sorted(path.iterdir())
        if file.suffix in (".json", ".safetensors", ".bin")
        for stat in [file.stat()]
    ]
    facts = [RECIPE, torch.__version__, HAS_VNNI, str(path.resolve()), files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _keep(file: Path, verdict: Verdict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(asdict(verdict)), "utf-8")
    part.replace(file)


def _recall(file: Path) -> Verdict | None:
    try:
        read = Verdict(**json.loads(file.read_text("utf-8")))
        known = read.quantization in ("int8", "fp16")
        return read if known and all(math.isfinite(value) for value in read.perplexity.values()) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None
