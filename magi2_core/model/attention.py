"""Attention of the preview transformer: pre-norm, q/k norm, rotary, sinks, per-head gate (spec preview.md 3.8).

`core` is a seam: a callable on local tokens and all heads. Head-exchanging context parallelism replaces it by one that
trades tokens for heads around the same attention; everything else in the module is local to a token. The gate is an argument
of it because one pass over the result applies sinks and gate.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from magi2_core.config import PreviewConfig
from magi2_kernels.common.sequences import CuSeqlens
from magi2_kernels.qk_norm_rope import qk_norm_rope
from magi2_kernels.sink_attention import gated_attention

from .layers import GroupedLinear, ModalityRMSNorm, frozen
from .packing import TokenContext


class AttentionCore(Protocol):
    """q, k, v [S, H, Dh], sinks fp32 [n_sink, H], cu_seqlens of the whole packed sequence, gate [S, H], to [S, H, Dh]."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu_seqlens: CuSeqlens, gate: Tensor) -> Tensor: ...


class Attention(nn.Module):
    """One branch: [S, C] in the stream's type to [S, C]. `blocks` is 3 in per-modality layers, else 1."""

    core: AttentionCore

    def __init__(self, config: PreviewConfig, blocks: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.head_dim, self.dtype = config.num_heads, config.head_dim, dtype
        width = self.heads * self.head_dim
        self.pre_norm = ModalityRMSNorm(config.hidden_size, blocks)
        self.linear_g = GroupedLinear(config.hidden_size, self.heads, blocks, dtype=dtype)
        self.linear_qkv = GroupedLinear(config.hidden_size, 3 * width, blocks, dtype=dtype)
        self.linear_proj = GroupedLinear(width, config.hidden_size, blocks, dtype=dtype)
        self.sinks = frozen(config.sink_tokens, self.heads)
        self.q_norm = ModalityRMSNorm(self.head_dim, blocks)
        self.k_norm = ModalityRMSNorm(self.head_dim, blocks)
        self.core = gated_attention

    def forward(self, x: Tensor, tokens: TokenContext, *, is_normed: bool = False) -> Tensor:
        """Attends within each packed sequence; q and k stay fp32 from the norm to the end of the rotation.

        `is_normed`: x went through `pre_norm` already, together with the making of the branch input.
        """
        segments = tokens.segments
        normed = x if is_normed else self.pre_norm(x, segments)
        gate = self.linear_g(normed, segments)
        q, k, v = self.linear_qkv(normed, segments).view(-1, 3, self.heads, self.head_dim).unbind(1)
        per_modality = segments if self.q_norm.blocks > 1 else None
        q, k = qk_norm_rope(q, k, self.q_norm.weight, self.k_norm.weight, tokens.rope, per_modality, out_dtype=self.dtype)
        out = self.core(q, k, v, self.sinks, tokens.cu_seqlens, gate)
        return self.linear_proj(out.flatten(1), segments)
