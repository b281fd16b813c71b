"""The same functions in plain PyTorch: exact softmax a chunk of queries at a time, so no S x S matrix exists."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.sequences import CuSeqlens

CHUNK_SCORES = 1 << 26
"""fp32 logits held at once: 256 MB."""


def packed_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens, *, scale: float) -> tuple[Tensor, Tensor]:
    """fp32 throughout, the result rounded once to the type of `q`."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for begin, end in cu_seqlens.bounds:
        if end == begin:
            continue
        keys = k[begin:end].float().permute(1, 2, 0)
        values = v[begin:end].float().transpose(0, 1)
        rows = max(1, CHUNK_SCORES // (q.shape[1] * (end - begin)))
        for start in range(begin, end, rows):
            stop = min(start + rows, end)
            scores = torch.matmul((q[start:stop].float() * scale).transpose(0, 1), keys)
            peak = scores.amax(dim=-1, keepdim=True)
            weights = scores.sub_(peak).exp_()
            total = weights.sum(dim=-1, keepdim=True)
            out[start:stop] = (torch.matmul(weights, values) / total).transpose(0, 1)
            lse[start:stop] = (total.log() + peak).squeeze(-1).transpose(0, 1)
    return out, lse


def sink_weight(lse: Tensor, sinks: Tensor) -> Tensor:
    """exp(lse - log(exp(lse) + exp(s))) with s the log-sum of the sink axis, by the larger of the two."""
    sink = torch.logsumexp(sinks.float(), dim=0).expand_as(lse)
    joint = torch.maximum(lse, sink) + F.softplus(torch.minimum(lse, sink) - torch.maximum(lse, sink))
    return torch.exp(lse - joint)


def finish(x: Tensor, lse: Tensor | None, sinks: Tensor | None, gate: Tensor | None) -> Tensor:
    """Sinks (with `lse`) and gate where given, each rounded to the type of `x`."""
    if lse is not None and sinks is not None:
        x = (x.float() * sink_weight(lse, sinks).unsqueeze(-1)).to(x.dtype)
    return x if gate is None else x * torch.sigmoid(gate).unsqueeze(-1)
