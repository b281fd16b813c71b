"""Block attention in plain PyTorch: the truth the kernel is tested against.

Softmax over the exact key set of each query block, computed in fp32 (fp64 for fp64 inputs) and cast back. Memory is bounded
by `SCORE_BUDGET`: queries are taken in rows that fit, so the tail of a long sequence works too.
Legend: S tokens, H heads, Hkv key/value heads, Dh head width.
"""

import torch
from torch import Tensor

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


def _key_ranges(ids: list[int], offsets: list[int], tail: tuple[int, int]) -> list[tuple[int, int]]:
    """The token ranges of the key blocks `ids` and the tail, adjacent ones merged."""
    ranges: list[tuple[int, int]] = []
    for start, stop in [*((offsets[i], offsets[i + 1]) for i in ids), tail]:
        if start == stop:
            continue
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return ranges


def block_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, block_offsets: Tensor, neighbour_offsets: Tensor, neighbours: Tensor, scale: float
) -> Tensor:
    """Attention where a block sees its neighbour blocks and the tail, and the tail sees all.

    Args: q [S, H, Dh]; k, v [S, Hkv, Dh]; the three int32 tensors of BlockLayout. Returns [S, H, Dh] in q's dtype.
    """
    tokens = q.shape[0]
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries, keys, values = (x.transpose(0, 1).to(work) for x in (q, k, v))
    offsets, lists, ids = block_offsets.tolist(), neighbour_offsets.tolist(), neighbours.tolist()
    tail = (offsets[-1], tokens)
    out = torch.empty_like(q)
    for block in range(len(offsets) - 1):
        start, stop = offsets[block], offsets[block + 1]
        ranges = _key_ranges(ids[lists[block] : lists[block + 1]], offsets, tail)
        seen_keys = torch.cat([keys[:, a:b] for a, b in ranges], dim=1)
        seen_values = torch.cat([values[:, a:b] for a, b in ranges], dim=1)
        out[start:stop] = _attend(queries[:, start:stop], seen_keys, seen_values, scale).transpose(0, 1).to(q.dtype)
    if tail[0] < tail[1]:
        out[tail[0] :] = _attend(queries[:, tail[0] :], keys, values, scale).transpose(0, 1).to(q.dtype)
    return out
