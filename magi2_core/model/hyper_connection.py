"""The learned hyper-connection of a layer: it wraps each branch in place of a residual addition (spec preview.md 3.7).

The parameters sit on the layer itself under the checkpoint's names (`mhc_phi_fused_attn` ...). One norm serves both branches;
the coefficients of a branch are made from the streams as that branch finds them.
"""

from collections.abc import Callable
from dataclasses import dataclass

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
    hyper_connect_mix,
    hyper_mix,
    hyper_projection,
)

from .layers import ModalityRMSNorm, frozen

BRANCHES = ("attn", "mlp")


@dataclass(eq=False)
class HyperState:
    """What goes from branch to branch: streams [S, N, C] and, not yet mixed into them, the last branch's output [S, C] with its
    coefficients. So the next branch connects and projects in one pass over the streams.

    A branch changes the state it is given: the streams are the largest tensor of a step, and a caller's copy would keep the old ones.
    After an error in a branch the state is of no use.
    """

    streams: Tensor
    branch: Tensor | None = None
    mix: HyperCoefficients | None = None

    def connected(self) -> Tensor:
        """Streams [S, N, C] with the last branch in them."""
        if self.branch is None or self.mix is None:
            return self.streams
        return hyper_connect(self.streams, self.branch, self.mix)


class HyperConnectedLayer(nn.Module):
    """Base of a layer: a `HyperState` goes through the branches `attn` and `mlp`."""

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
        self, branch: str, state: HyperState, segments: ModalitySegments, norm: ModalityRMSNorm, compute: Callable[[Tensor], Tensor]
    ) -> HyperState:
        """The state, changed: `compute` [S, C] -> [S, C] ran on the branch input, normalised by `norm` already."""
        weights = (self.hyper_weights(branch), self.mhc_norm.weight, norm.weight, segments)
        if state.branch is None or state.mix is None:
            normed, state.mix = hyper_mix(state.streams, *weights, iterations=self.iterations)
        else:
            open_ends = state.streams, state.branch, state.mix
            state.streams, normed, state.mix = hyper_connect_mix(*open_ends, *weights, iterations=self.iterations)
            del open_ends
        state.branch = None
        state.branch = compute(normed)
        return state


def split_streams(x: Tensor, num_streams: int) -> Tensor:
    """[S, N * C] as [S, N, C], a view: stream n owns channels n * C .. (n + 1) * C - 1."""
    return x.unflatten(1, (num_streams, -1))


def join_streams(streams: Tensor) -> Tensor:
    """[S, N, C] as [S, N * C], a view."""
    return torch.flatten(streams, 1)
