"""Block attention by the library's attention: blocks with equally many queries and keys go through it together.

The keys of a block are copied out of the sequence once for all its query heads: the query heads that share a key head are laid
end to end, which needs no mask, so that a product of 128 queries and a copied key becomes one of 512. Nothing waits for
the device once the lists of the layout have been read.
Legend: S tokens, H heads, Hkv key/value heads, Dh head width, B blocks at once.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .layout import BlockGroup, BlockLayout

KEY_BYTES = 1 << 30
"""Of copied keys at once, and as much of values."""

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN, which prepares every size anew: a 1080p clip has 28 kinds of blocks."""


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [B, Sq, H, Dh] over k, v [B, Sk, Hkv, Dh], to q's shape."""
    batch, queries, heads, width = q.shape
    groups = k.shape[2]
    folded = q.reshape(batch, queries, groups, -1, width).permute(0, 2, 3, 1, 4).flatten(2, 3)
    with sdpa_kernel(BACKENDS):
        out = F.scaled_dot_product_attention(folded, k.transpose(1, 2), v.transpose(1, 2), scale=scale)
    return out.unflatten(2, (heads // groups, queries)).permute(0, 3, 1, 2, 4).reshape(q.shape)


def _rows(starts: Tensor, lengths: Tensor, total: int) -> Tensor:
    """int64 [total]: starts[0], starts[0] + 1, ... for lengths[0] rows, then from starts[1] on."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(total, device=starts.device) + torch.repeat_interleave(starts - before, lengths, output_size=total)


def _attend_group(q: Tensor, k: Tensor, v: Tensor, group: BlockGroup, scale: float, out: Tensor) -> None:
    """Writes the rows of `out` that belong to the blocks of `group`."""
    at_once = max(1, KEY_BYTES // max(1, group.keys * k.shape[1] * k.shape[2] * k.element_size()))
    for first in range(0, group.num_blocks, at_once):
        last = min(first + at_once, group.num_blocks)
        count = last - first
        ranges = slice(group.range_ends[first], group.range_ends[last])
        queries = (group.first_query[first:last, None] + torch.arange(group.queries, device=q.device)).flatten()
        keys = _rows(group.range_starts[ranges], group.range_lengths[ranges], count * group.keys)
        mine, seen, values = (x.index_select(0, rows).unflatten(0, (count, -1)) for x, rows in ((q, queries), (k, keys), (v, keys)))
        out.index_copy_(0, queries, _attend(mine, seen, values, scale).flatten(0, 1))


def block_attention(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float) -> Tensor:
    """As the public function; sums in fp32, the softmax's result is rounded to the type of `q` before it meets the values."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in layout.groups:
        _attend_group(q, k, v, group, scale, out)
    if layout.tail:
        out[-layout.tail :] = _attend(q[None, -layout.tail :], k[None], v[None], scale)[0]
    return out
