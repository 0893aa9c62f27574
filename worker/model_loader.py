"""From a local folder to a model on its device, ready for the paged cache.

Runs in the thread that starts the worker. Never fetches anything, never runs a model's own code or unpickles weights
unless settings allow it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from common.config import WorkerConfig
from common.errors import ConfigError, ModelError
from worker.activation import align_activations
from worker.attention import choose_attention
from worker.linear import can_pack, pack_linears
from worker.quantization import Verdict, choose_quantization, describe

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layer, in the words of a config's `layer_types`, that keep all their state in the paged cache."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode and what its configuration says of it.

    max_model_len: the model's own context length in tokens. num_layers: decoder layers. layer_types: one for each
    layer, or empty. dtype, quantization, attention: what was chosen where the setting says auto.
    """

    model: PreTrainedModel
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    layer_types: tuple[str, ...]
    window: int | None
    dtype: str
    quantization: str
    perplexity: dict[str, float]
    attention: str


def choose_device(name: str) -> torch.device:
    """Return the device for --device. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError("device", f"{name} is not auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", f"{name} is not auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError("device", f"{name} is not there: this process sees {torch.cuda.device_count()} CUDA devices")
    return device


def choose_arithmetic(config: WorkerConfig, device: torch.device) -> tuple[str, str]:
    """Return the names of dtype and quantization, which may be `auto` still where both kinds would do.

    Raises ConfigError for a pair that does not work.
    """
    on_cpu = device.type == "cpu"
    quantization = config.quantization
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if on_cpu else "bfloat16"
    if quantization == "auto":
        return dtype, "auto" if on_cpu and dtype == "float32" and can_pack() else "none"
    if quantization != "none" and not on_cpu:
        raise ConfigError("quantization", f"{quantization} packs linear layers for the CPU only; leave it at auto")
    if quantization != "none" and dtype != "float32":
        raise ConfigError("quantization", f"{quantization} needs dtype float32, not {dtype}")
    if quantization != "none" and not can_pack():
        raise ConfigError("quantization", f"torch packs nothing as {quantization} on this processor; leave it at auto")
    return dtype, quantization


def load_model(path: Path, config: WorkerConfig, report: Callable[[str], None] = lambda line: None) -> LoadedModel:
    """Load the folder (config.json and safetensors). `report` takes lines for the log.

    Raises ModelError or ConfigError.
    """
    device = choose_device(config.device)
    dtype, quantization = choose_arithmetic(config, device)
    attention = choose_attention(config.attn_implementation, device.type, config.block_size)
    settings = _read_config(path, config.trust_remote_code)
    text = settings.get_text_config(decoder=True)

    def load(kind: str) -> PreTrainedModel:
        model = _read_weights(path, settings, config, _DTYPES[dtype], attention.name)
        if device.type == "cpu" and dtype == "float32":
            pack_linears(model, kind)
            align_activations(model)
        model.to(device).eval()  # type: ignore[arg-type]
        return model

    verdict = Verdict(quantization)
    if quantization == "auto":
        verdict = choose_quantization(path, _context_length(text), config.cache_path, load, report)
        report(describe(verdict))
    return LoadedModel(
        model=load(verdict.quantization),
        vocab_size=int(text.vocab_size),
        max_model_len=_context_length(text),
        eos_token_ids=_eos_token_ids(path, text),
        num_layers=int(text.num_hidden_layers),
        layer_types=tuple(getattr(text, "layer_types", None) or ()),
        window=_window(text),
        dtype=dtype,
        quantization=verdict.quantization,
        perplexity=verdict.perplexity,
        attention=attention.name,
    )


def _read_config(path: Path, trust_remote_code: bool) -> PreTrainedConfig:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json; name the folder of a model in transformers' format")
    try:
        settings: PreTrainedConfig = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers raises many kinds for a folder it cannot use
        raise ModelError(f"{path}: {error}") from error
    if settings.is_encoder_decoder:
        raise ModelError(f"{settings.model_type} has an encoder; only decoder models can be served")
    unsupported = set(getattr(settings.get_text_config(decoder=True), "layer_types", None) or ()) - SUPPORTED_LAYERS
    if unsupported:
        raise ModelError(
            f"{settings.model_type} has layers of kind {', '.join(sorted(unsupported))}, not supported yet"
        )
    return settings


def _read_weights(
    path: Path, settings: PreTrainedConfig, config: WorkerConfig, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    transformers.utils.logging.disable_progress_bar()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path,
            config=settings,
            local_files_only=True,
            use_safetensors=None if config.allow_pickle else True,
            trust_remote_code=config.trust_remote_code,
            dtype=dtype,
            attn_implementation=attention,
        )
    except Exception as error:  # transformers raises many kinds for a folder it cannot use
        raise ModelError(f"{path} cannot be loaded: {error}") from error
    return model


def _context_length(text: PreTrainedConfig) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 1:
            return value
    raise ModelError(f"{text.model_type}: the configuration names no context length")


def _window(text: PreTrainedConfig) -> int | None:
    window = getattr(text, "sliding_window", None)
    return int(window) if window and getattr(text, "use_sliding_window", True) else None


def _eos_token_ids(path: Path, text: PreTrainedConfig) -> tuple[int, ...]:
    """Return the ids that end an answer: generation_config.json's where it has some, else config.json's."""
    found = text.eos_token_id
    if (path / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(path, local_files_only=True)
        found = generation.eos_token_id if generation.eos_token_id is not None else found
    ids = [] if found is None else [found] if isinstance(found, int) else list(found)
    return tuple(dict.fromkeys(int(each) for each in ids))
