"""Computes a step: the model's forward pass over the packed batch, then the sampler.

Owns the model and the tensors of the KV cache. Runs on the engine thread; knows nothing of requests or queues.
"""

import torch
from transformers import PreTrainedModel

from worker.attention import PagedKVCache
from worker.batch import StepBatch
from worker.paged import StepContext
from worker.sampler import sample


class TorchRunner:
    """A Runner around a transformers model whose attention is one of worker.attention.IMPLEMENTATIONS."""

    def __init__(self, model: PreTrainedModel, num_blocks: int, block_size: int):
        self._model = model
        self._block_size = block_size
        self.kv_cache = PagedKVCache(num_blocks, block_size)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> list[int]:
        """Write the step's keys and values and return one token id for each of `batch.samples`."""
        logits = self.logits(batch, [row.row for row in batch.samples])
        return sample(logits, batch.samples) if batch.samples else []

    @torch.inference_mode()
    def logits(self, batch: StepBatch, rows: list[int]) -> torch.Tensor:
        """Compute the step and return the logits [len(rows), vocab_size] that follow these packed rows."""
        device = self._model.device
        # A model asked for no row would compute all of them; one row that nobody reads is cheaper.
        keep = torch.tensor(rows or [0], dtype=torch.int64, device=device)
        output = self._model(
            input_ids=torch.tensor([batch.input_ids], dtype=torch.int64, device=device),
            position_ids=torch.tensor([batch.positions], dtype=torch.int64, device=device),
            use_cache=False,
            logits_to_keep=keep,
            kv_cache=self.kv_cache,
            step=StepContext(batch, self._block_size, device),
        )
        logits: torch.Tensor = output.logits[0, : len(rows)]
        return logits
