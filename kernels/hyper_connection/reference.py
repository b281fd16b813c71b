"""The same functions in plain PyTorch. Rows are taken in chunks so that the fp32 copies of a long sequence stay small."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..common.segments import ModalitySegments
from ..modality_rms_norm.reference import modality_rms_norm, rms_norm

if TYPE_CHECKING:
    from . import HyperCoefficients, HyperWeights

EPS = 1e-6
SINKHORN_EPS = 1e-12
CHUNK_ROWS = 8192
"""8192 rows of 12,288 fp32 channels are 400 MB."""


def hyper_projection(streams: Tensor, norm_weight: Tensor, phi: Tensor, segments: ModalitySegments | None) -> Tensor:
    """Norm and product, a chunk of one modality at a time."""
    flat = streams.flatten(1)
    out = torch.empty(flat.shape[0], phi.shape[1], dtype=torch.float32, device=flat.device)
    blocks = norm_weight.view(-1, flat.shape[1])
    for run_start, run_stop, modality in segments.runs if segments is not None else ((0, flat.shape[0], 0),):
        for start in range(run_start, run_stop, CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, run_stop)
            out[start:stop] = rms_norm(flat[start:stop], blocks[modality], eps=EPS, out_dtype=torch.float32) @ phi
    return out


def fold_norm(norm_weight: Tensor, phi: Tensor, dtype: torch.dtype) -> None:
    """Nothing to prepare: the norm is applied to the streams."""


def hyper_mix(
    streams: Tensor,
    weights: "HyperWeights",
    norm_weight: Tensor,
    branch_norm_weight: Tensor,
    segments: ModalitySegments | None,
    iterations: int,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The four steps one after the other."""
    width, channels = streams.shape[1] * streams.shape[2], streams.shape[2]
    projection = hyper_projection(streams, norm_weight, weights.phi, segments if norm_weight.shape[0] != width else None)
    pre, post, res = hyper_coefficients(projection, weights, width=width, iterations=iterations)
    pre, post, res = pre.to(streams.dtype), post.to(streams.dtype), res.to(streams.dtype)
    branch_in = hyper_branch_input(streams, pre)
    chosen = segments if branch_norm_weight.shape[0] != channels else None
    return modality_rms_norm(branch_in, branch_norm_weight, chosen, eps=EPS, out_dtype=streams.dtype), (pre, post, res)


def hyper_connect_mix(
    streams: Tensor,
    branch: Tensor,
    coefficients: "HyperCoefficients",
    weights: "HyperWeights",
    norm_weight: Tensor,
    branch_norm_weight: Tensor,
    segments: ModalitySegments | None,
    iterations: int,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Connect, then mix."""
    mixed = hyper_connect(streams, branch, coefficients.post, coefficients.res)
    return mixed, *hyper_mix(mixed, weights, norm_weight, branch_norm_weight, segments, iterations)


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Makes [S, N, N] nearly doubly stochastic: exp of the logits minus their maximum, then columns, rows, columns, rows ..."""
    matrix = torch.exp(logits - logits.amax(dim=(1, 2), keepdim=True))
    for _ in range(iterations):
        matrix = matrix / (matrix.sum(dim=1, keepdim=True) + SINKHORN_EPS)
        matrix = matrix / (matrix.sum(dim=2, keepdim=True) + SINKHORN_EPS)
    return matrix


def hyper_coefficients(projection: Tensor, weights: "HyperWeights", *, width: int, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """The three sets in fp32."""
    n = weights.bias_pre.shape[0]
    scale = 1.0 / math.sqrt(width)
    pre, post, res = projection.split([n, n, n * n], dim=1)
    return (
        torch.sigmoid(weights.alpha_pre * scale * pre + weights.bias_pre),
        2.0 * torch.sigmoid(weights.alpha_post * scale * post + weights.bias_post),
        sinkhorn(weights.alpha_res * scale * res.unflatten(1, (n, n)) + weights.bias_res, iterations),
    )


def hyper_branch_input(streams: Tensor, pre: Tensor) -> Tensor:
    """Products of the stored values, summed in fp32, one rounding."""
    out = torch.empty(streams.shape[0], streams.shape[2], dtype=streams.dtype, device=streams.device)
    for start in range(0, streams.shape[0], CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        out[rows] = (pre[rows].float().unsqueeze(-1) * streams[rows].float()).sum(dim=1)
    return out


def hyper_connect(streams: Tensor, branch: Tensor, post: Tensor, res: Tensor) -> Tensor:
    """The N mixed streams first, the branch last, one rounding."""
    out = torch.empty_like(streams)
    for start in range(0, streams.shape[0], CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        mixed = torch.matmul(res[rows].float(), streams[rows].float())
        out[rows] = mixed.addcmul_(post[rows].float().unsqueeze(-1), branch[rows].float().unsqueeze(1))
    return out
