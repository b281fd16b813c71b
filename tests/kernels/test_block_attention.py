"""Block attention against a masked softmax in float64 that gets its mask from a rule of its own."""

from collections.abc import Iterator

import pytest
import torch

from magi2_kernels.block_attention import block_attention, library, reference
from magi2_kernels.block_attention.layout import BlockLayout
from magi2_kernels.common.choice import using

SIZES = [5, 1, 7, 3]
SEEN = {0: [0, 1], 1: [1, 3], 2: [2], 3: [0, 1, 2, 3]}


@pytest.fixture(params=["reference", "triton"])
def choice(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both forms: plain PyTorch, and what is used beside the Triton kernels."""
    with using(request.param):
        yield request.param


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
def test_block_attention_equals_masked_softmax(choice: str, tail: int, groups: int) -> None:
    q, k, v = _qkv(tail, groups=groups)
    torch.testing.assert_close(block_attention(q, k, v, _layout(tail)).double(), _expected(q, k, v, tail, 8**-0.5), atol=1e-6, rtol=1e-5)


def test_block_attention_explicit_scale(choice: str) -> None:
    q, k, v = _qkv(3)
    torch.testing.assert_close(block_attention(q, k, v, _layout(3), scale=0.9).double(), _expected(q, k, v, 3, 0.9), atol=1e-6, rtol=1e-5)


def test_block_attention_bf16_rounds_once() -> None:
    q, k, v = _qkv(6, dtype=torch.bfloat16)
    assert torch.equal(block_attention(q, k, v, _layout(6)), _expected(q, k, v, 6, 8**-0.5).bfloat16())


def test_block_attention_strided_views(choice: str) -> None:
    packed = torch.randn(sum(SIZES) + 2, 8, 8, generator=torch.Generator().manual_seed(0))
    q, k, v = packed.split((4, 2, 2), dim=1)
    assert not k.is_contiguous()
    torch.testing.assert_close(block_attention(q, k, v, _layout(2)).double(), _expected(q, k, v, 2, 8**-0.5), atol=1e-6, rtol=1e-5)


def test_block_attention_score_budget_changes_nothing(monkeypatch) -> None:
    q, k, v = _qkv(6)
    whole = block_attention(q, k, v, _layout(6))
    monkeypatch.setattr(reference, "SCORE_BUDGET", 100)
    torch.testing.assert_close(block_attention(q, k, v, _layout(6)), whole, atol=1e-6, rtol=1e-6)


def test_block_attention_dense_layout_is_plain_attention(choice: str) -> None:
    q, k, v = _qkv(6, groups=4)
    plain = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)
    torch.testing.assert_close(block_attention(q, k, v, BlockLayout.dense(q.shape[0])), plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tail", [0, 1, 6])
def test_block_attention_bf16_of_the_library(tail: int) -> None:
    q, k, v = _qkv(tail, dtype=torch.bfloat16)
    with using("triton"):
        got = block_attention(q, k, v, _layout(tail))
    want = _expected(q, k, v, tail, 8**-0.5)
    assert got.dtype == torch.bfloat16 and ((got.double() - want).norm() / want.norm()).item() < 6e-3


def test_block_attention_few_blocks_at_once_change_nothing(monkeypatch) -> None:
    blocks = torch.arange(6)
    layout = BlockLayout.from_pairs(
        torch.full((6,), 3), blocks.repeat_interleave(2), torch.cat([blocks, blocks.roll(1)]).view(2, 6).T.flatten(), 4
    )
    q, k, v = (torch.randn(22, heads, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    with using("triton"):
        whole = block_attention(q, k, v, layout)
        assert len(layout.groups) == 1
        monkeypatch.setattr(library, "KEY_BYTES", 4 * 10 * 2 * 8 * 4)
        parts = block_attention(q, k, v, layout)
    with using("reference"):
        torch.testing.assert_close(whole, block_attention(q, k, v, layout), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-6)


def test_block_attention_block_that_sees_nothing(choice: str) -> None:
    layout = BlockLayout.from_pairs(torch.tensor([2, 3]), torch.tensor([0]), torch.tensor([0]), 0)
    with pytest.raises(ValueError, match="block 1 has tokens but sees none"):
        block_attention(*(torch.zeros(5, 2, 8) for _ in range(3)), layout)


def test_block_attention_no_tokens(choice: str) -> None:
    empty = torch.zeros(0, 2, 8)
    assert block_attention(empty, empty, empty, BlockLayout.dense(0)).shape == (0, 2, 8)


def test_block_attention_wrong_length(choice: str) -> None:
    q, k, v = _qkv(6)
    with pytest.raises(ValueError, match="the layout 18"):
        block_attention(q, k, v, _layout(2))


def test_block_attention_heads_do_not_divide(choice: str) -> None:
    q, k, v = _qkv(2, groups=3)
    with pytest.raises(ValueError, match="must divide the 4"):
        block_attention(q, k, v, _layout(2))


def test_block_attention_empty_block(choice: str) -> None:
    q, k, v = (torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    layout = BlockLayout.from_pairs(torch.tensor([0, 4]), torch.tensor([0, 1]), torch.tensor([1, 1]), 0)
    plain = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)
    torch.testing.assert_close(block_attention(q, k, v, layout), plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "keys", "tail", "says"),
    [
        ([2, 2], [0, 7], 0, "blocks 0 to 7"),
        ([2, 2], [0, -1], 0, "blocks -1"),
        ([2, -2], [0, 1], 0, "negative"),
        ([2, 2], [0, 1], -1, "negative"),
    ],
)
def test_layout_of_blocks_that_are_not_there(sizes: list[int], keys: list[int], tail: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        BlockLayout.from_pairs(torch.tensor(sizes), torch.tensor([0, 1]), torch.tensor(keys), tail)
