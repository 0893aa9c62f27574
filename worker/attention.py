"""Attention over the paged KV cache, as one of transformers' attention functions, and the tensors of that cache.

A step reaches this module through the model's keyword arguments (`attention_step`, `kv_cache`); each decoder layer
calls `paged_attention` with its own queries, keys and values. Plain torch operations on whatever device the cache is.
Runs on the engine thread. Never decides what a step computes.

The bits of a token's result depend neither on the other tokens of the step nor on whether it was computed in a decode
step, a chunk or a long prefill. Matrix products on the CPU give the same bits for a row when they have at least 16
rows, and for a sum over the context when it is cut into pieces of fixed length; hence ROW_MULTIPLE and PIECE.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from common.errors import ConfigError, ModelError
from worker.attention_step import AttentionStep, TileGroup

ROW_MULTIPLE = 16
"""Query rows of a matrix product are padded to a multiple of this."""

PIECE = 128
"""Context tokens that one matrix product sums over at most; the pieces are added in order."""


@dataclass(frozen=True, slots=True)
class AttentionImplementation:
    """An attention that works with continuous batching.

    name: what transformers knows it by. device_types: where it runs. block_multiple: block_size must be a multiple.
    """

    name: str
    device_types: frozenset[str]
    block_multiple: int = 1


PAGED_TORCH = AttentionImplementation("paged_torch", frozenset({"cpu", "cuda"}))

IMPLEMENTATIONS = (PAGED_TORCH,)
"""In order of preference; `auto` takes the first that runs on the device."""


def choose_attention(name: str, device_type: str, block_size: int) -> AttentionImplementation:
    """Return the implementation that `--attn-implementation` names. Raises ConfigError that lists those that work."""
    usable = [each for each in IMPLEMENTATIONS if device_type in each.device_types]
    if name == "auto" and usable:
        return usable[0]
    for implementation in usable:
        if implementation.name == name:
            if block_size % implementation.block_multiple:
                multiple = implementation.block_multiple
                raise ConfigError("block_size", f"must be a multiple of {multiple} for the attention {name}")
            return implementation
    names = ", ".join(["auto", *(each.name for each in usable)])
    raise ConfigError(
        "attn_implementation", f"{name} does not work with continuous batching on {device_type}; these do: {names}"
    )


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer asked of attention the first time it called; heads and sizes fix its share of the cache."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    bytes_per_element: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of cache that one token takes in this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * self.bytes_per_element


@dataclass(slots=True)
class PagedKVCache:
    """Keys and values of every layer, in blocks of `block_size` tokens, plus one block of zeros that pads tables.

    A layer's tensors are made at its first call: keys [kv_heads, num_blocks + 1, block_size, key_dim], values alike.
    On the CPU memory that was never written is never touched.
    """

    num_blocks: int
    block_size: int
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    calls: dict[int, LayerCall] = field(default_factory=dict)

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, window: int | None, step: AttentionStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a step's keys [kv_heads, tokens, key_dim] and values in their slots; return the layer's tensors."""
        if layer not in self.layers:
            self.layers[layer] = (self._allocate(key), self._allocate(value))
            self.calls[layer] = LayerCall(key.shape[0], key.shape[2], value.shape[2], window, key.element_size())
        for stored, new in zip(self.layers[layer], (key, value), strict=True):
            # Blocks start out with leftovers, or with whatever was in memory. They are read up to their end, hidden by
            # the mask, and a hidden NaN would still spoil a sum.
            if step.fresh_blocks.numel():
                stored.index_fill_(1, step.fresh_blocks, 0)
            stored.view(stored.shape[0], -1, stored.shape[3]).index_copy_(1, step.slots, new)
        return self.layers[layer]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers that have called so far."""
        return sum(call.bytes_per_token for call in self.calls.values())

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        tensor = like.new_empty(like.shape[0], self.num_blocks + 1, self.block_size, like.shape[2])
        tensor[:, self.num_blocks].zero_()
        return tensor


_HARMLESS_ARGUMENTS = frozenset(
    {
        "cache_position",
        "is_causal",  # checked below
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    attention_step: AttentionStep | None = None,
    kv_cache: PagedKVCache | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Write this step's keys and values, and attend through the block tables.

    query [1, heads, tokens, key_dim], key and value [1, kv_heads, tokens, dim]; returns [1, tokens, heads, value_dim].
    softcap: scores become softcap * tanh(score / softcap) (Gemma 2). s_aux: one more logit per head that takes part in
    the softmax and carries no value (attention sinks of gpt-oss). Raises ModelError for anything else a layer asks
    that would change the result.
    """
    if attention_step is None or kv_cache is None:
        raise ModelError(f"{type(module).__name__} does not pass keyword arguments on to its attention")
    _refuse_unsupported(module, attention_mask, dropout, others)
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = kv_cache.write(layer, key[0], value[0], sliding_window, attention_step)
    tokens, heads = query.shape[2], query.shape[1]
    query = query[0] * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    query = query.view(keys.shape[0], heads // keys.shape[0], tokens, query.shape[-1])
    sinks = None if s_aux is None else s_aux.float().view(keys.shape[0], 1, 1, -1, 1)
    groups = attention_step.groups(sliding_window)
    output = query.new_empty(tokens, heads, values.shape[-1])
    for group in groups:
        output.index_copy_(0, group.rows, _attend(query, keys, values, group, softcap, sinks))
    return output[None], None


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: TileGroup,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return [tiles * queries, heads, value_dim] for one group; query is [kv_heads, heads per kv head, tokens, dim].

    The query heads that share a kv head are rows of the same product, so that keys and values are read once.
    """
    kv_heads, shared, _, dim = query.shape
    tiles, queries = group.num_tiles, group.num_queries
    rows, batch = queries * shared, kv_heads * tiles
    q = query.index_select(2, group.rows).view(kv_heads, shared, tiles, queries, dim).permute(0, 2, 3, 1, 4)
    padded = query.new_zeros(batch, -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE, dim)
    padded[:, :rows] = q.reshape(batch, rows, dim)
    k = keys.index_select(1, group.blocks).view(batch, -1, dim)
    v = values.index_select(1, group.blocks).view(batch, -1, values.shape[-1])

    scores = torch.bmm(padded, k.transpose(1, 2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    context = scores.shape[-1]
    seen = scores[:, :rows].view(kv_heads, tiles, queries, shared, context)
    seen.masked_fill_(group.hidden[None, :, :, None, :], float("-inf"))
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)

    result = torch.bmm(weights[:, :, :PIECE], v[:, :PIECE])
    for at in range(PIECE, context, PIECE):
        result = torch.baddbmm(result, weights[:, :, at : at + PIECE], v[:, at : at + PIECE])
    result = result[:, :rows].view(kv_heads, tiles, queries, shared, -1)
    if sinks is not None:
        # The sink takes its share of the softmax: every weight shrinks by sum / (sum + exp(sink)).
        total = torch.logsumexp(seen.float(), -1, keepdim=True)
        result = result * torch.sigmoid(total - sinks).to(result.dtype)
    return result.permute(1, 2, 0, 3, 4).reshape(tiles * queries, kv_heads * shared, -1)


def _refuse_unsupported(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, dropout: float, others: dict[str, Any]
) -> None:
    """Raise ModelError for arguments that would change the result and are not implemented here."""
    name = type(module).__name__
    if attention_mask is not None:
        raise ModelError(f"{name} passes an attention mask of its own; this model is not supported")
    if dropout or others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{name} asks for dropout or for attention that is not causal; this model is not supported")
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _HARMLESS_ARGUMENTS)
    if unknown:
        raise ModelError(f"{name} asks its attention for {', '.join(unknown)}; this model is not supported")


AttentionInterface.register(PAGED_TORCH.name, paged_attention)
