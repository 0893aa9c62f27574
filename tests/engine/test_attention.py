"""Which attention works, what a layer may not ask of it, and how a step is cut into tiles."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AttentionInterface, masking_utils

from common.errors import ConfigError, ModelError
from worker.attention import IMPLEMENTATIONS, PagedKVCache, choose_attention, paged_attention
from worker.attention_step import MAX_GROUP_TOKENS, AttentionStep, Tile, group_by_context, split_segment
from worker.batch import Segment, StepBatch


@pytest.mark.parametrize(
    "name", ["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "paged|sdpa", "nonsense", ""]
)
def test_naming_one_that_does_not_work_lists_those_that_do(name):
    with pytest.raises(ConfigError) as caught:
        choose_attention(name, "cpu", 32)
    assert caught.value.key == "attn_implementation"
    for usable in ("auto", "paged_torch"):
        assert usable in str(caught.value)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_auto_and_every_listed_name_work(device_type):
    for name in ("auto", *(each.name for each in IMPLEMENTATIONS if device_type in each.device_types)):
        assert choose_attention(name, device_type, 32) in IMPLEMENTATIONS


def test_transformers_knows_them_and_builds_no_dense_mask_for_them():
    for implementation in IMPLEMENTATIONS:
        assert implementation.name in AttentionInterface().valid_keys()
        assert implementation.name not in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()


class Layer(torch.nn.Module):
    layer_idx = 0


def attend(layer: torch.nn.Module | None = None, **more):
    """Three tokens of one request through a layer with 4 query heads over 2 key heads."""
    torch.manual_seed(0)
    batch = StepBatch([5, 6, 7], [0, 1, 2], [4, 5, 6], [Segment(0, 0, 3, [1])], [])
    arguments = {
        "attention_mask": None,
        "attention_step": AttentionStep(batch, 4, 2, torch.device("cpu")),
        "kv_cache": PagedKVCache(2, 4),
    }
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 6)
    return paged_attention(layer or Layer(), q, k, v, **arguments | more)[0], (q, k, v)


def exact(q, k, v, scaling, softcap=None, sinks=None) -> torch.Tensor:
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = q.double() @ k.double().transpose(2, 3) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(torch.ones(3, 3).triu(1).bool(), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, 4, 1, 1).expand(1, 4, 3, 1)], -1)
    return (scores.softmax(-1)[..., :3] @ v.double()).transpose(1, 2).float()


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -1.0, 2.0, 0.0])])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_scores_softcap_sinks_and_values_of_another_size(softcap, sinks, scaling):
    """Against attention written down plainly, in double precision."""
    found, (q, k, v) = attend(softcap=softcap, s_aux=sinks, scaling=scaling)
    expected = exact(q, k, v, 8**-0.5 if scaling is None else scaling, softcap, sinks)
    assert torch.allclose(found, expected, atol=1e-5)


class NotCausal(Layer):
    is_causal = False


@pytest.mark.parametrize(
    ("layer", "asked", "said"),
    [
        (Layer(), {"attention_mask": torch.zeros(1, 1, 3, 3)}, "mask"),
        (Layer(), {"dropout": 0.1}, "dropout"),
        (Layer(), {"is_causal": False}, "causal"),
        (NotCausal(), {}, "causal"),
        (Layer(), {"position_bias": torch.zeros(1)}, "position_bias"),
        (Layer(), {"attention_step": None}, "keyword"),
    ],
)
def test_what_would_change_the_result_is_refused(layer, asked, said):
    """Ignoring an argument silently would serve wrong answers."""
    with pytest.raises(ModelError, match=said):
        attend(layer, **asked)


def test_arguments_that_say_nothing_are_ignored():
    attend(position_ids=torch.zeros(1), use_cache=False, output_attentions=False, position_bias=None)


# --- tiles ------------------------------------------------------------------------------------------------------------

windows = st.sampled_from([None, 1, 5, 16, 24, 100, 512])


@given(st.integers(0, 3000), st.integers(1, 700), windows, st.sampled_from([1, 8, 16, 32]))
def test_tiles_cover_a_segment_and_all_it_may_see(start, length, window, block_size):
    """Each position once and in order, with every block of its window."""
    table = list(range(-(-(start + length) // block_size)))
    tiles = list(split_segment(Segment(7, start, length, table), window, block_size))
    at = start
    for tile in tiles:
        assert (tile.start, tile.row) == (at, 7 + at - start)
        assert tile.length > 0
        first_seen = 0 if window is None else max(0, tile.start - window + 1)
        assert tile.first_block * block_size <= first_seen
        assert tile.end_block * block_size >= tile.start + tile.length
        assert 0 <= tile.first_block < tile.end_block <= len(table)
        at += tile.length
    assert at == start + length


@given(st.integers(0, 2000), st.integers(1, 300), windows, st.sampled_from([8, 32]))
def test_where_a_query_starts_to_read_depends_on_its_position_alone(start, length, window, block_size):
    """Else sums over the context would run in another order in a chunk than in a decode, with other last bits."""
    table = list(range(1000))

    def first_blocks(segment: Segment) -> dict[int, int]:
        tiles = split_segment(segment, window, block_size)
        return {at: tile.first_block for tile in tiles for at in range(tile.start, tile.start + tile.length)}

    for at, first_block in first_blocks(Segment(0, start, length, table)).items():
        assert first_blocks(Segment(0, at, 1, table)) == {at: first_block}


def test_sliding_layers_read_their_window_only():
    """A long context must not cost a layer with a short window more than a short one."""
    [tile] = split_segment(Segment(0, 30_000, 1, list(range(2000))), 512, 32)
    assert tile.num_blocks * 32 <= 512 + 512 // 4 + 2 * 32


@given(st.lists(st.integers(1, 1024), min_size=1, max_size=64), st.sampled_from([8, 32, 128]))
def test_decode_groups_hold_each_sequence_once_and_bound_the_padding(lengths, block_size):
    tiles = [Tile(i, block_size * n - 1, 1, 0, n, list(range(n))) for i, n in enumerate(lengths)]
    groups = list(group_by_context(tiles, block_size))
    assert sorted(tile.row for group in groups for tile in group) == list(range(len(lengths)))
    for group in groups:
        padded = len(group) * max(tile.num_blocks for tile in group)
        assert len(group) == 1 or padded * block_size <= MAX_GROUP_TOKENS
        assert padded <= 1.5 * sum(tile.num_blocks for tile in group) + 64


def test_sixteen_equal_decodes_are_one_batch():
    batch = StepBatch(segments=[Segment(i, 200 + i, 1, list(range(20))) for i in range(16)])
    assert len(AttentionStep(batch, 32, 99, torch.device("cpu")).groups(None)) == 1
