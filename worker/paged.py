"""The tensors of one step's attention: where keys and values are written, and which of them each token may read.

Built once per step from a StepBatch (once per distinct sliding window), shared by all layers. Plain torch on any
device; runs on the engine thread. Nothing here depends on a model's layers or is computed from keys and values.

Every index points at a slot that this step's own request has written. Positions past a token's own are pointed at that
token itself and masked, so what another request left in a block, NaN among it, is never read.
"""

import math
from dataclasses import dataclass

import torch

from worker.batch import Segment, StepBatch

CONTEXT_TILE_TOKENS = 128
"""Contexts are padded to this. A weighted sum over values is made tile by tile, see worker/attention.py."""


@dataclass(slots=True)
class DecodeGroup:
    """Segments of one token each, padded to one context length.

    rows: int64 [B], their rows in the packed batch. slots: int64 [B × P], the cache slots of each one's context.
    hidden: bool [B, P], True where a slot must not be read.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    hidden: torch.Tensor


@dataclass(slots=True)
class PrefillSegment:
    """One segment of several tokens.

    first, last: its rows in the packed batch, last excluded. slots: int64 [P], its context. hidden: bool [length, P].
    """

    first: int
    last: int
    slots: torch.Tensor
    hidden: torch.Tensor


@dataclass(slots=True)
class ContextPlan:
    """How a layer reads the cache in this step."""

    decodes: list[DecodeGroup]
    prefills: list[PrefillSegment]


class StepContext:
    """A step's indices, made when a layer first asks for them."""

    def __init__(self, batch: StepBatch, block_size: int, device: torch.device):
        self._segments = batch.segments
        self._block_size = block_size
        self._alignment = math.lcm(block_size, CONTEXT_TILE_TOKENS)
        self._device = device
        self._plans: dict[int | None, ContextPlan] = {}
        self.slots = torch.tensor(batch.slots, dtype=torch.int64, device=device)
        """int64 [T]: where each token's key and value are written."""

    def plan(self, window: int | None) -> ContextPlan:
        """Return how to read the cache when a token sees itself and the window - 1 tokens before it (None: all)."""
        if window not in self._plans:
            self._plans[window] = self._make_plan(window)
        return self._plans[window]

    def _make_plan(self, window: int | None) -> ContextPlan:
        groups: dict[int, list[Segment]] = {}
        for segment in self._segments:
            if segment.length == 1:
                groups.setdefault(self._padded_tokens(segment, window).bit_length(), []).append(segment)
        return ContextPlan(
            decodes=[self._decode_group(segments, window) for segments in groups.values()],
            prefills=[self._prefill(segment, window) for segment in self._segments if segment.length > 1],
        )

    def _first_position(self, segment: Segment, window: int | None) -> int:
        """Return where the segment's context begins: at what its first token sees, rounded down to whole tiles.

        So a position falls into the same tile whichever token reads it, and sums over tiles have the same bits.
        """
        first = 0 if window is None else max(0, segment.start - window + 1)
        return first // self._alignment * self._alignment

    def _padded_tokens(self, segment: Segment, window: int | None) -> int:
        length = segment.start + segment.length - self._first_position(segment, window)
        return -(-length // CONTEXT_TILE_TOKENS) * CONTEXT_TILE_TOKENS

    def _context(self, segments: list[Segment], window: int | None, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions int64 [B, padded] that are read and the slots int64 [B, padded] they are in."""
        blocks = -(-padded // self._block_size)
        firsts = [self._first_position(segment, window) for segment in segments]
        tables = []
        for segment, first in zip(segments, firsts, strict=True):
            table = segment.block_table[first // self._block_size :][:blocks]
            tables.append(table + [0] * (blocks - len(table)))
        block_ids = torch.tensor(tables, dtype=torch.int64, device=self._device)
        offsets = torch.arange(padded, device=self._device)
        slots = block_ids[:, offsets // self._block_size] * self._block_size + offsets % self._block_size
        positions = torch.tensor(firsts, dtype=torch.int64, device=self._device)[:, None] + offsets
        return positions, slots

    def _decode_group(self, segments: list[Segment], window: int | None) -> DecodeGroup:
        padded = max(self._padded_tokens(segment, window) for segment in segments)
        positions, slots = self._context(segments, window, padded)
        rows = torch.tensor([segment.row for segment in segments], dtype=torch.int64, device=self._device)
        own = torch.tensor([segment.start for segment in segments], dtype=torch.int64, device=self._device)[:, None]
        hidden = positions > own
        slots = torch.where(hidden, self.slots[rows][:, None], slots)
        if window is not None:
            hidden |= positions <= own - window
        return DecodeGroup(rows, slots.flatten(), hidden)

    def _prefill(self, segment: Segment, window: int | None) -> PrefillSegment:
        positions, slots = self._context([segment], window, self._padded_tokens(segment, window))
        first, last = segment.row, segment.row + segment.length
        own = torch.arange(segment.start, segment.start + segment.length, device=self._device)[:, None]
        hidden = positions > own
        slots = torch.where(positions[0] >= segment.start + segment.length, self.slots[last - 1], slots[0])
        if window is not None:
            hidden |= positions <= own - window
        return PrefillSegment(first, last, slots, hidden)
