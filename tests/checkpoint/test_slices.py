"""Which rows a rank reads: spec preview.md 2.4, 7.3."""

import pytest
import torch

from magi2_core.checkpoint.slices import Slice, expert_slices, head_range, is_expert_tensor
from magi2_core.config import MoEConfig
from magi2_core.errors import RequestError


def test_is_expert_tensor_names():
    layer = "block.layers.7.mlp."
    split = [
        "moe_mlp.gate",
        "moe_mlp.W_gate",
        "moe_mlp.W_up",
        "moe_mlp.W_down",
        "moe_mlp.router.expert_bias",
        "moe_mlp.router.expert_bias_ema",
    ]
    whole = ["split_linear.weight", "shared_expert_fc1.weight", "pre_norm.weight", "moe_mlp.other", "moe_mlp.router.gate"]
    assert [is_expert_tensor(layer + name) for name in split] == [True] * 6
    assert [is_expert_tensor(layer + name) for name in whole] == [False] * 5


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 8, 12, 16])
def test_head_range_covers_every_head_once(size):
    heads = [head for rank in range(size) for head in head_range(12, rank, size)]
    assert heads == list(range(12))
    padded = [len(head_range(12, rank, size, padded=True)) for rank in range(size)]
    assert set(padded) == {-(-12 // size)}


def test_head_range_eight_ranks_leaves_two_idle():
    assert [len(head_range(12, rank, 8)) for rank in range(8)] == [2] * 6 + [0, 0]
    assert head_range(12, 7, 8, padded=True) == range(14, 16)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_head_range_wrong_rank(rank, size):
    with pytest.raises(RequestError, match="expert-parallel rank"):
        head_range(12, rank, size)


def test_expert_slices_released_rows():
    """Rows of rank 3 of 8 in the released layout: heads 6 and 7, 256 experts each."""
    rule = expert_slices(MoEConfig(), 3, 8)
    assert rule("block.layers.2.mlp.moe_mlp.W_up") == Slice(0, 1536, 2048)
    assert rule("block.layers.2.mlp.split_linear.weight") is None
    assert expert_slices(MoEConfig(), 0, 1) is None
    assert expert_slices(MoEConfig(), 7, 8, padded=True)("a.moe_mlp.gate").stored(3072) == (3072, 3072)


def test_slice_local_shape_is_what_a_tensor_gives():
    part = Slice(1, 2, 5)
    assert torch.zeros(4, 9, 2)[:, slice(*part.stored(9))].shape == part.local_shape((4, 9, 2))
