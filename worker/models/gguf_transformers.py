"""GGUF architectures without a translation of our own: transformers reads the file itself, and its result is kept.

Slow, and it holds the whole model in float32 while it runs; but once only. Needs torch; runs in the converting thread.
"""

import json
import logging
from pathlib import Path
from typing import Any

from common.errors import ModelError
from worker.models.gguf_file import GGUFFile

log = logging.getLogger(__name__)


def write_with_transformers(gguf: Path, file: GGUFFile, folder: Path) -> dict[str, Any]:
    """Write config.json and the weights to `folder`; return the configuration.

    Raises ModelError when transformers does not know the architecture, or finds no weight for a part of the model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    log.warning("no fast conversion for GGUF architecture %r; transformers converts it, slowly", file.architecture)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
        )
        read, loading = loaded
        if loading["missing_keys"]:
            raise ValueError(f"there is nothing for {sorted(loading['missing_keys'])[:5]}")
        # the model that was read calls itself quantised, which cannot be saved; the same weights in a plain one can
        config: dict[str, Any] = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        plain.load_state_dict(read.state_dict(), assign=True)
        plain.tie_weights()
        plain.save_pretrained(folder)
    except (ValueError, KeyError, TypeError, AttributeError, NotImplementedError, RuntimeError) as error:
        raise ModelError(f"GGUF architecture {file.architecture!r} cannot be converted: {error}") from error
    saved: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return saved
