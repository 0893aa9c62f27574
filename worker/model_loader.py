"""Loads a model folder onto the device, with paged attention and packed linear layers.

Runs once, in the thread that starts the worker. Model code comes from transformers; weights from safetensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from common.config import WorkerConfig
from common.errors import ConfigError, ModelError
from worker.attention import choose_attention
from worker.linear import pack_linear_layers

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model runs and in which arithmetic. quantization: a key of worker.linear.PACKERS."""

    device: torch.device
    dtype: torch.dtype
    attention: str
    quantization: str


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run and what the scheduler must know of it. max_model_len: tokens, by the model itself."""

    model: PreTrainedModel
    placement: Placement
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]


def choose_placement(config: WorkerConfig) -> Placement:
    """Decide on device and arithmetic. Raises ConfigError, naming the key, for what this machine does not have."""
    device = _choose_device(config.device)
    on_cpu = device.type == "cpu"
    dtype = _DTYPES.get(config.dtype, torch.float32 if on_cpu else torch.bfloat16)
    quantization = config.quantization
    if quantization == "auto":
        quantization = "fp16" if on_cpu and dtype == torch.float32 else "none"
    if quantization != "none" and not (on_cpu and dtype == torch.float32):
        raise ConfigError("quantization", f"{quantization} is for the CPU with --dtype float32")
    return Placement(device, dtype, choose_attention(config.attn_implementation), quantization)


def load_model(path: Path, config: WorkerConfig, report: Callable[[str], None]) -> LoadedModel:
    """Load the model in a local folder. Raises ConfigError or ModelError."""
    if config.threads:
        torch.set_num_threads(config.threads)
    placement = choose_placement(config)
    model_config = _read_config(path, config)
    report(f"loading weights from {path.name}")
    model = _load_weights(path, config, placement)
    if placement.device.type == "cpu" and placement.dtype == torch.float32:
        report(f"packing linear layers ({placement.quantization})")
        pack_linear_layers(model, placement.quantization)
    text_config = model_config.get_text_config(decoder=True)
    return LoadedModel(
        model=model,
        placement=placement,
        max_model_len=_context_length(text_config),
        vocab_size=_vocab_size(model),
        eos_token_ids=_eos_token_ids(path, model_config),
    )


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError("device", f"{name!r} is no device; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", f"{name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError("device", f"{name!r} is not here: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def _read_config(path: Path, config: WorkerConfig) -> PreTrainedConfig:
    try:
        model_config: PreTrainedConfig = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path} has no configuration that transformers understands: {error}") from None
    if model_config.is_encoder_decoder:
        raise ModelError(f"{path.name} is an encoder-decoder model; only decoder models can be served")
    return model_config


def _load_weights(path: Path, config: WorkerConfig, placement: Placement) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=placement.dtype,
            attn_implementation=placement.attention,
            local_files_only=True,
            use_safetensors=None if config.allow_pickle else True,
            weights_only=True,
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{path} cannot be loaded: {error}") from error
    model.eval().requires_grad_(False)
    model.to(placement.device)
    return model


def _vocab_size(model: PreTrainedModel) -> int:
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, torch.nn.Embedding):
        raise ModelError(f"{type(model).__name__} has no plain token embedding")
    return embedding.num_embeddings


def _context_length(text_config: PreTrainedConfig) -> int:
    for name in _CONTEXT_NAMES:
        value = getattr(text_config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError("the model's configuration names no context length; give --max-model-len")


def _eos_token_ids(path: Path, model_config: PreTrainedConfig) -> frozenset[int]:
    """Return every token id that ends an answer, from generation_config.json or else config.json."""
    if (path / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
    else:
        ids = model_config.get_text_config(decoder=True).eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
