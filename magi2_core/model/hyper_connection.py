"""The learned hyper-connection of a layer: it wraps each branch in place of a residual addition (spec preview.md 3.7).

The parameters sit on the layer itself under the checkpoint's names (`mhc_phi_fused_attn` ...). One norm serves both branches;
the coefficients of a branch are made from the streams as that branch finds them.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from magi2_core.config import PreviewConfig
from magi2_kernels.common.segments import ModalitySegments
from magi2_kernels.hyper_connection import (
    HyperCoefficients,
    HyperWeights,
    fold_norm,
    hyper_coefficients,
    hyper_connect,
    hyper_mix,
    hyper_projection,
)

from .layers import ModalityRMSNorm, frozen

BRANCHES = ("attn", "mlp")


class HyperConnectedLayer(nn.Module):
    """Base of a layer: streams [S, N, C] around the branches `attn` and `mlp`."""

    def __init__(self, config: PreviewConfig, blocks: int) -> None:
        super().__init__()
        n, width = config.num_streams, config.stream_width
        self.iterations = config.sinkhorn_iterations
        for branch in BRANCHES:
            for name in ("pre", "post", "res"):
                self.register_parameter(f"mhc_alpha_{name}_{branch}", frozen(1))
                self.register_parameter(f"mhc_bias_{name}_{branch}", frozen(n, n) if name == "res" else frozen(n))
            self.register_parameter(f"mhc_phi_fused_{branch}", frozen(width, n * (n + 2)))
            # Made by `prepare` where the kernels want it; a buffer so that it moves with the weights, not part of a checkpoint.
            self.register_buffer(f"folded_{branch}", None, persistent=False)
        self.mhc_norm = ModalityRMSNorm(width, blocks)

    def prepare(self, dtype: torch.dtype) -> None:
        """Folds the norm into phi for streams of type `dtype`, once the weights are in and the kernels are chosen."""
        for branch in BRANCHES:
            setattr(self, f"folded_{branch}", fold_norm(self.mhc_norm.weight, self.get_parameter(f"mhc_phi_fused_{branch}"), dtype))

    def hyper_weights(self, branch: str) -> HyperWeights:
        """The learned numbers of "attn" or "mlp"."""
        named = {
            f"{kind}_{name}": self.get_parameter(f"mhc_{kind}_{name}_{branch}")
            for kind in ("alpha", "bias")
            for name in ("pre", "post", "res")
        }
        return HyperWeights(phi=self.get_parameter(f"mhc_phi_fused_{branch}"), folded=getattr(self, f"folded_{branch}"), **named)

    def project(self, branch: str, streams: Tensor, segments: ModalitySegments) -> Tensor:
        """fp32 [S, N * (N + 2)]: the normalised streams times phi."""
        chosen = segments if self.mhc_norm.blocks > 1 else None
        return hyper_projection(streams, self.mhc_norm.weight, self.hyper_weights(branch).phi, chosen)

    def coefficients(self, branch: str, streams: Tensor, segments: ModalitySegments) -> HyperCoefficients:
        """The coefficients of a branch, in the type of the streams."""
        width = streams.shape[1] * streams.shape[2]
        projection = self.project(branch, streams, segments)
        return hyper_coefficients(projection, self.hyper_weights(branch), width=width, iterations=self.iterations, out_dtype=streams.dtype)

    def through(
        self, branch: str, streams: Tensor, segments: ModalitySegments, norm: ModalityRMSNorm, compute: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """New streams after `compute` [S, C] -> [S, C] ran on the branch input, normalised by `norm` already."""
        normed, mix = hyper_mix(
            streams, self.hyper_weights(branch), self.mhc_norm.weight, norm.weight, segments, iterations=self.iterations
        )
        return hyper_connect(streams, compute(normed), mix)


def split_streams(x: Tensor, num_streams: int) -> Tensor:
    """[S, N * C] as [S, N, C], a view: stream n owns channels n * C .. (n + 1) * C - 1."""
    return x.unflatten(1, (num_streams, -1))


def join_streams(streams: Tensor) -> Tensor:
    """[S, N, C] as [S, N * C], a view."""
    return torch.flatten(streams, 1)
