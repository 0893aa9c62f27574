"""Attention over the paged KV cache, registered with transformers under the name PAGED.

Owns the keys and values of every layer. A model's attention layers call `paged_attention`, which finds the cache and
the step in the keyword arguments that the runner gave to the model. Plain torch operators, so it runs on any device.

Batch invariance: the bits of a token's result depend neither on the other rows of the step nor on whether it is
computed in a decode, a chunk or one long prefill. Matrix products keep that promise on CPUs when (measured with MKL,
float32) they have at least 16 rows, and when no sum is so long that it is split differently for different lengths: scores sum
over head_dim, which is short, and the weighted sum over values is made in tiles of CONTEXT_TILE_TOKENS. Padding adds
exact zeros.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface

from common.errors import ConfigError, ModelError
from worker.paged import CONTEXT_TILE_TOKENS, DecodeGroup, PrefillSegment, StepContext

PAGED = "tokenloom_paged"
"""The name under which transformers knows this attention."""

MIN_ROWS = 16
MAX_SCORES = 1 << 25
"""Scores that exist at one time in a prefill, per step of its loop over query tokens: 128 MiB in float32."""

# What layers pass that is the same for all or says nothing new. Anything else that is set would be ignored silently.
_HARMLESS = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
    | {"is_causal", "position_embeddings", "logits_to_keep", "num_items_in_batch", "output_router_logits"}
)


class PagedKVCache:
    """Keys and values of all layers: per layer two tensors [num_kv_heads, num_blocks × block_size, head_dim].

    A layer's tensors are made when it first writes, for only then are its shapes known. They are zeros that the system
    hands out untouched, so memory is taken as blocks are used.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self._num_slots = num_blocks * block_size
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def num_layers(self) -> int:
        """Layers that have written so far."""
        return len(self._layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers that have written so far."""
        return sum(t.shape[0] * t.shape[2] * t.element_size() for pair in self._layers.values() for t in pair)

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys and values [num_kv_heads, T, head_dim] of T tokens; return all of the layer's."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(key), self._empty(value))
        keys, values = self._layers[layer]
        keys.index_copy_(1, slots, key)
        values.index_copy_(1, slots, value)
        return keys, values

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros((like.shape[0], self._num_slots, like.shape[2]), dtype=like.dtype, device=like.device)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    kv_cache: PagedKVCache | None = None,
    step: StepContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write this step's keys and values and attend through the block tables (an AttentionInterface function).

    query [1, num_heads, T, head_dim], key and value [1, num_kv_heads, T, head_dim]; gives [1, T, num_heads, head_dim].
    Raises ModelError when the layer asks for something that this attention does not do.
    """
    if kv_cache is None or step is None:
        raise ModelError(f"{type(module).__name__} does not pass the cache on to its attention")
    unknown = [name for name, given in kwargs.items() if given is not None and name not in _HARMLESS]
    if unknown or attention_mask is not None or dropout or kwargs.get("is_causal") is False:
        what = unknown or ["attention_mask, dropout or is_causal=False"]
        raise ModelError(f"{type(module).__name__} asks its attention for {', '.join(what)}, which is not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = kv_cache.write(layer, step.slots, key[0], value[0])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads = _Heads(query[0], keys, values, scale, softcap, s_aux)
    plan = step.plan(sliding_window)
    out = query.new_empty((query.shape[2], query.shape[1], values.shape[2]))
    for group in plan.decodes:
        heads.decode(group, out)
    for segment in plan.prefills:
        heads.prefill(segment, out)
    return out[None], None


class _Heads:
    """One layer's attention in one step. Query heads that share a key head are folded into rows."""

    def __init__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ):
        num_heads, _, head_dim = query.shape
        self._num_kv_heads = keys.shape[0]
        self._fold = num_heads // self._num_kv_heads
        # [num_kv_heads, T, fold, head_dim]
        self._query = query.view(self._num_kv_heads, self._fold, -1, head_dim).transpose(1, 2)
        self._keys, self._values = keys, values
        self._scale, self._softcap, self._sinks = scale, softcap, sinks

    def decode(self, group: DecodeGroup, out: torch.Tensor) -> None:
        """Attend from one token of each of B requests at once. Fills their rows of out [T, num_heads, head_dim]."""
        batch, context = group.hidden.shape
        rows = max(self._fold, MIN_ROWS)
        query = self._query.new_zeros((self._num_kv_heads, batch, rows, self._query.shape[-1]))
        query[:, :, : self._fold] = self._query[:, group.rows]
        keys = self._keys.index_select(1, group.slots).view(self._num_kv_heads * batch, context, -1)
        values = self._values.index_select(1, group.slots).view(self._num_kv_heads * batch, context, -1)
        scores = torch.bmm(query.view(self._num_kv_heads * batch, rows, -1), keys.transpose(1, 2))
        weights = self._weights(scores.view(self._num_kv_heads, batch, rows, context), group.hidden[None, :, None])
        result = _weighted_sum(weights.view(self._num_kv_heads * batch, rows, context), values)
        result = result.view(self._num_kv_heads, batch, rows, -1)[:, :, : self._fold]
        out[group.rows] = result.transpose(0, 1).reshape(batch, -1, result.shape[-1])

    def prefill(self, segment: PrefillSegment, out: torch.Tensor) -> None:
        """Attend from consecutive tokens of one request. Fills their rows of out [T, num_heads, head_dim]."""
        keys = self._keys.index_select(1, segment.slots)
        values = self._values.index_select(1, segment.slots)
        context = keys.shape[1]
        length = segment.last - segment.first
        part = max(1, MAX_SCORES // (self._num_kv_heads * self._fold * context))
        for at in range(0, length, part):
            hidden = segment.hidden[at : at + part]
            first = segment.first + at
            self._prefill_part(first, hidden, keys, values, out[first : first + hidden.shape[0]])

    def _prefill_part(
        self, first: int, hidden: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        length, context = hidden.shape
        tokens = max(length, -(-MIN_ROWS // self._fold))
        query = self._query[:, first : first + length]
        if tokens > length:
            query = torch.nn.functional.pad(query, (0, 0, 0, 0, 0, tokens - length))
            hidden = torch.cat([hidden, hidden[-1:].expand(tokens - length, context)])
        scores = torch.bmm(query.reshape(self._num_kv_heads, tokens * self._fold, -1), keys.transpose(1, 2))
        weights = self._weights(scores.view(self._num_kv_heads, tokens, self._fold, context), hidden[None, :, None])
        result = _weighted_sum(weights.view(self._num_kv_heads, tokens * self._fold, context), values)
        result = result.view(self._num_kv_heads, tokens, self._fold, -1)[:, :length]
        out.copy_(result.transpose(0, 1).reshape(length, -1, result.shape[-1]))

    def _weights(self, scores: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Turn scores [num_kv_heads, N, rows, context] into attention weights, in place where it can."""
        scores = scores.mul_(self._scale)
        if self._softcap is not None:
            scores = torch.tanh(scores / self._softcap) * self._softcap
        scores = scores.masked_fill_(hidden, float("-inf"))
        if self._sinks is None:
            return torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
        # A sink is a learned score that takes its share of the softmax and gives nothing.
        sinks = torch.zeros(scores.shape[0], 1, scores.shape[2], 1, dtype=scores.dtype, device=scores.device)
        sinks[:, 0, : self._fold, 0] = self._sinks.view(-1, self._fold)
        joined = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
        return torch.softmax(joined, -1, dtype=torch.float32)[..., :-1].to(scores.dtype).contiguous()


def _weighted_sum(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return weights [N, rows, context] times values [N, context, head_dim], summed tile by tile over the context."""
    tile = CONTEXT_TILE_TOKENS
    result = torch.bmm(weights[:, :, :tile], values[:, :tile])
    for at in range(tile, values.shape[1], tile):
        result = torch.baddbmm(result, weights[:, :, at : at + tile], values[:, at : at + tile])
    return result


AttentionFunction = Callable[..., tuple[torch.Tensor, None]]

IMPLEMENTATIONS: dict[str, AttentionFunction] = {PAGED: paged_attention}
"""Attention functions that read and write the paged cache, by name, the preferred one first."""


def choose_attention(name: str) -> str:
    """Return the implementation to load a model with and make transformers know it.

    name: `auto`, or one of IMPLEMENTATIONS. Raises ConfigError for one that does not work with continuous batching.
    """
    if name == "auto":
        name = next(iter(IMPLEMENTATIONS))
    if name not in IMPLEMENTATIONS:
        working = ", ".join(["auto", *IMPLEMENTATIONS])
        raise ConfigError(
            "attn_implementation", f"{name} does not work with continuous batching here; these do: {working}"
        )
    AttentionInterface.register(name, IMPLEMENTATIONS[name])
    return name
