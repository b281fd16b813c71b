"""Block attention in plain PyTorch: the truth the fast form is tested against.

Softmax over the exact key set of each query block, computed in fp32 (fp64 for fp64 inputs) and cast back. Memory is bounded
by `SCORE_BUDGET`: queries are taken in rows that fit, so the tail of a long sequence works too.
Legend: S tokens, H heads, Hkv key/value heads, Dh head width.
"""

import torch
from torch import Tensor

from .layout import BlockLayout

SCORE_BUDGET = 1 << 26
"""Scores held at once (heads x queries x keys): 256 MB in fp32."""


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Plain attention of q [H, Sq, Dh] over k, v [Hkv, Sk, Dh]; query head i uses key/value head i // (H / Hkv)."""
    heads, queries, width = q.shape
    groups = k.shape[0]
    per_row = max(1, heads * k.shape[1])
    rows = max(1, SCORE_BUDGET // per_row)
    grouped = q.view(groups, heads // groups, queries, width)
    pieces = []
    for start in range(0, queries, rows):
        scores = torch.einsum("gjqd,gkd->gjqk", grouped[:, :, start : start + rows] * scale, k)
        pieces.append(torch.einsum("gjqk,gkd->gjqd", scores.softmax(dim=-1), v))
    return torch.cat(pieces, dim=2).reshape(heads, queries, width)


def block_attention(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float) -> Tensor:
    """Attention where a block sees its neighbour blocks and the tail, and the tail sees all; as the public function."""
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries, keys, values = (x.transpose(0, 1).to(work) for x in (q, k, v))
    out = torch.empty_like(q)
    for start, stop, ranges in zip(layout.offsets, layout.offsets[1:], layout.key_ranges, strict=False):
        if start == stop:
            continue
        seen_keys, seen_values = (torch.cat([x[:, a:b] for a, b in ranges], dim=1) for x in (keys, values))
        out[start:stop] = _attend(queries[:, start:stop], seen_keys, seen_values, scale).transpose(0, 1).to(q.dtype)
    if layout.tail:
        out[-layout.tail :] = _attend(queries[:, -layout.tail :], keys, values, scale).transpose(0, 1).to(q.dtype)
    return out
