"""Runs a step on the device: integers in, one token id for each sampling row out.

Owns the model and the tensors of the KV cache. Runs on the engine thread. Never decides what is in a step.
"""

import inspect

import torch
from transformers import PreTrainedModel

from worker.attention import PagedKVCache
from worker.attention_step import AttentionStep
from worker.batch import StepBatch, StepResult
from worker.logprobs import score, start_logprobs
from worker.sampler import sample


class TorchRunner:
    """Computes steps with a transformers model whose attention is one of worker.attention's."""

    def __init__(self, model: PreTrainedModel, num_blocks: int, block_size: int):
        self.model = model
        self.cache = PagedKVCache(num_blocks, block_size)
        self._device = model.device
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(self, batch: StepBatch) -> StepResult:
        """Compute a step; see worker.batch.Runner. A row whose logits cannot be used gives worker.sampler.UNUSABLE."""
        with torch.inference_mode():
            rows = [row.row for row in batch.samples] + [row.row for row in batch.scores]
            logits = self.forward(batch, rows or [0])
            drawn, scored = logits[: len(batch.samples)], logits[len(batch.samples) :]
            if not batch.samples:
                return StepResult([], prompt_logprobs=score(scored, batch.scores))
            tell = start_logprobs(drawn, batch.samples)
            token_ids = sample(drawn, batch.samples)
            return StepResult(token_ids, tell(token_ids), score(scored, batch.scores))

    def forward(self, batch: StepBatch, rows: list[int]) -> torch.Tensor:
        """Write the step's keys and values and return the float32 logits [rows, vocabulary] of some packed rows."""
        device = self._device
        step = AttentionStep(batch, self.cache.block_size, self.cache.num_blocks, device)
        kept = torch.tensor(rows, device=device)
        outputs = self.model(
            input_ids=torch.tensor([batch.input_ids], device=device),
            position_ids=torch.tensor([batch.positions], device=device),
            use_cache=False,
            attention_step=step,
            kv_cache=self.cache,
            **({"logits_to_keep": kept} if self._selects_logits else {}),
        )
        logits: torch.Tensor = outputs.logits[0]
        if not self._selects_logits:
            logits = logits.index_select(0, kept)
        return logits.float()
