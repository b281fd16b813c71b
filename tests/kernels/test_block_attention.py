"""Block attention against a masked softmax in float64 that gets its mask from a rule of its own."""

import pytest
import torch

from magi2_kernels.block_attention import block_attention, reference
from magi2_kernels.block_attention.layout import BlockLayout

SIZES = [5, 1, 7, 3]
SEEN = {0: [0, 1], 1: [1, 3], 2: [2], 3: [0, 1, 2, 3]}


def _layout(tail: int) -> BlockLayout:
    pairs = [(block, key) for block, keys in SEEN.items() for key in reversed(keys)]
    query, key = (torch.tensor(column) for column in zip(*pairs, strict=True))
    return BlockLayout.from_pairs(torch.tensor(SIZES), query, key, tail)


def _expected(q, k, v, tail: int, scale: float):
    owner = [block for block, size in enumerate(SIZES) for _ in range(size)] + [-1] * tail
    mask = torch.tensor([[a == -1 or b == -1 or b in SEEN[a] for b in owner] for a in owner])
    repeat = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(repeat, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), values)


def _qkv(tail: int, heads: int = 4, groups: int = 2, width: int = 8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tail)
    tokens = sum(SIZES) + tail
    return tuple(torch.randn(tokens, count, width, generator=generator).to(dtype) for count in (heads, groups, groups))


@pytest.mark.parametrize("tail", [0, 1, 6])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_block_attention_equals_masked_softmax(tail: int, groups: int) -> None:
    q, k, v = _qkv(tail, groups=groups)
    torch.testing.assert_close(block_attention(q, k, v, _layout(tail)).double(), _expected(q, k, v, tail, 8**-0.5), atol=1e-6, rtol=1e-5)


def test_block_attention_explicit_scale() -> None:
    q, k, v = _qkv(3)
    torch.testing.assert_close(block_attention(q, k, v, _layout(3), scale=0.9).double(), _expected(q, k, v, 3, 0.9), atol=1e-6, rtol=1e-5)


def test_block_attention_bf16_rounds_once() -> None:
    q, k, v = _qkv(6, dtype=torch.bfloat16)
    assert torch.equal(block_attention(q, k, v, _layout(6)), _expected(q, k, v, 6, 8**-0.5).bfloat16())


def test_block_attention_strided_views() -> None:
    packed = torch.randn(sum(SIZES) + 2, 8, 8, generator=torch.Generator().manual_seed(0))
    q, k, v = packed.split((4, 2, 2), dim=1)
    assert not k.is_contiguous()
    torch.testing.assert_close(block_attention(q, k, v, _layout(2)).double(), _expected(q, k, v, 2, 8**-0.5), atol=1e-6, rtol=1e-5)


def test_block_attention_score_budget_changes_nothing(monkeypatch) -> None:
    q, k, v = _qkv(6)
    whole = block_attention(q, k, v, _layout(6))
    monkeypatch.setattr(reference, "SCORE_BUDGET", 100)
    torch.testing.assert_close(block_attention(q, k, v, _layout(6)), whole, atol=1e-6, rtol=1e-6)


def test_block_attention_dense_layout_is_plain_attention() -> None:
    q, k, v = _qkv(6, groups=4)
    plain = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)
    torch.testing.assert_close(block_attention(q, k, v, BlockLayout.dense(q.shape[0])), plain, atol=1e-6, rtol=1e-5)


def test_block_attention_wrong_length() -> None:
    q, k, v = _qkv(6)
    with pytest.raises(ValueError, match="the layout 18"):
        block_attention(q, k, v, _layout(2))


def test_block_attention_heads_do_not_divide() -> None:
    q, k, v = _qkv(2, groups=3)
    with pytest.raises(ValueError, match="must divide the 4"):
        block_attention(q, k, v, _layout(2))
