"""Where each token of a step finds its context: block tables as index tensors and masks, built once per step.

Every layer of a step reads the same blocks (one set for each distinct sliding window), so the indices are computed at
the first layer that asks and shared by the rest. Runs on the engine thread. Never computes attention, never touches
the keys and values themselves.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from worker.batch import Segment, StepBatch

MAX_GROUP_TOKENS = 32768
"""Padded context tokens that one batched decode reads at most, which bounds its scratch memory."""

MAX_PADDING = 1.5
"""A decode group's padded context against what its sequences have: beyond it a new group starts."""

TILE_SCORES = 128 * 1024
"""Query rows times context of one prefill tile at most (per head), so that scores stay in the processor's cache."""

CONTEXT_MULTIPLE = 16
"""Context tokens of a group are padded to a multiple of this: sums over other numbers have other last bits."""

MIN_TILE_ROWS = 32
"""Query rows of a prefill tile at least, however long the context."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Consecutive query rows of one sequence and the blocks they read: [first_block, end_block) of its table.

    row, start, length: as in Segment.
    """

    row: int
    start: int
    length: int
    first_block: int
    end_block: int
    block_table: list[int]

    @property
    def num_blocks(self) -> int:
        """Blocks this tile reads."""
        return self.end_block - self.first_block


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Tiles with equally many query rows that are computed as one batch of matrix products.

    rows: [tiles * queries] packed row of each query. blocks: [tiles * context_blocks] block ids, padded with the
    cache's zero block. hidden: bool [tiles, queries, context] True where a query may not look.
    """

    num_tiles: int
    num_queries: int
    rows: torch.Tensor
    blocks: torch.Tensor
    hidden: torch.Tensor


@dataclass(slots=True)
class AttentionStep:
    """One step as attention sees it; every layer gets it through the model's keyword arguments.

    slots: int64 [tokens] where each token's key and value go. fresh_blocks: int64 ids of the blocks whose first slot
    is written in this step: the cache clears them first, so that no block in use holds anyone's leftovers.
    """

    batch: StepBatch
    block_size: int
    zero_block: int
    device: torch.device
    slots: torch.Tensor = field(init=False)
    fresh_blocks: torch.Tensor = field(init=False)
    _groups: dict[int | None, list[TileGroup]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.block_size
        self.slots = torch.tensor(self.batch.slots, dtype=torch.int64, device=self.device)
        fresh = [slot // size for slot in self.batch.slots if slot % size == 0]
        self.fresh_blocks = torch.tensor(fresh, dtype=torch.int64, device=self.device)

    def groups(self, window: int | None) -> list[TileGroup]:
        """Return the work of a layer whose queries see the last `window` tokens, themselves included (None: all)."""
        if window not in self._groups:
            self._groups[window] = list(self._build_groups(window))
        return self._groups[window]

    def _build_groups(self, window: int | None) -> Iterator[TileGroup]:
        tiles = [tile for segment in self.batch.segments for tile in split_segment(segment, window, self.block_size)]
        for decodes in group_by_context([tile for tile in tiles if tile.length == 1], self.block_size):
            yield self._group(decodes, window)
        for tile in tiles:
            if tile.length > 1:
                yield self._group([tile], window)

    def _padded(self, num_blocks: int) -> int:
        """Return the smallest number of blocks from this on whose tokens are a multiple of CONTEXT_MULTIPLE."""
        step = math.lcm(self.block_size, CONTEXT_MULTIPLE) // self.block_size
        return -(-num_blocks // step) * step

    def _group(self, tiles: list[Tile], window: int | None) -> TileGroup:
        """Turn tiles of equal length into tensors."""
        num_blocks, num_queries = self._padded(max(tile.num_blocks for tile in tiles)), tiles[0].length
        ids: list[int] = []
        for tile in tiles:
            ids += tile.block_table[tile.first_block : tile.end_block]
            ids += [self.zero_block] * (num_blocks - tile.num_blocks)
        rows = torch.tensor([tile.row for tile in tiles])[:, None] + torch.arange(num_queries)
        position = torch.tensor([tile.start for tile in tiles])[:, None] + torch.arange(num_queries)
        context = torch.tensor([tile.first_block * self.block_size for tile in tiles])[:, None] + torch.arange(
            num_blocks * self.block_size
        )
        ahead = context[:, None, :] - position[:, :, None]  # [tiles, queries, context]
        hidden = ahead > 0
        if window is not None:
            hidden |= ahead <= -window
        return TileGroup(
            num_tiles=len(tiles),
            num_queries=num_queries,
            rows=rows.flatten().to(self.device),
            blocks=torch.tensor(ids).to(self.device),
            hidden=hidden.to(self.device),
        )


def split_segment(segment: Segment, window: int | None, block_size: int) -> Iterator[Tile]:
    """Cut a segment into tiles that are cheap to compute.

    With a sliding window, the first block a query reads depends on its own position alone (through the aligned span it
    is in), never on where the segment happens to start: sums over the context then run in the same order in a decode
    step, a chunk and a long prefill, and give the same bits.
    """
    end = segment.start + segment.length
    span = end if window is None else block_size * max(1, window // (4 * block_size))
    at = segment.start
    while at < end:
        first_block = 0 if window is None else max(0, at // span * span - window + 1) // block_size
        span_end = min(end, (at // span + 1) * span)
        rows = max(MIN_TILE_ROWS, TILE_SCORES // (span_end - first_block * block_size))
        tile_end = min(span_end, at + rows)
        row = segment.row + at - segment.start
        yield Tile(row, at, tile_end - at, first_block, -(-tile_end // block_size), segment.block_table)
        at = tile_end


def group_by_context(tiles: list[Tile], block_size: int) -> Iterator[list[Tile]]:
    """Group tiles of like context, so that padding to the longest of a group wastes little."""
    group: list[Tile] = []
    used_blocks = 0
    for tile in sorted(tiles, key=lambda tile: -tile.num_blocks):
        if group:
            padded = group[0].num_blocks * (len(group) + 1)
            # A few blocks more or less are not worth another round of small matrix products.
            wasteful = padded > MAX_PADDING * (used_blocks + tile.num_blocks) + 64
            if wasteful or padded * block_size > MAX_GROUP_TOKENS:
                yield group
                group, used_blocks = [], 0
        group.append(tile)
        used_blocks += tile.num_blocks
    if group:
        yield group
