"""Manifold hyper-connections: N residual streams, mixed around a branch by coefficients made from the streams (spec preview.md 3.7).

`hyper_projection` and `hyper_coefficients` make the three coefficient sets, `hyper_branch_input` the branch's input and
`hyper_connect` the new streams. `hyper_mix` is everything in front of a branch in one call, its norm included, and `hyper_connect_mix`
everything between two branches: what a model runs.
All are local to a token. Legend: S tokens, N streams, C channels, M modalities.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.checks import check_rank, check_rows, weight_blocks
from ..common.choice import implementation
from ..common.segments import ModalitySegments

FILES = {"reference": "reference", "triton": "kernel"}


@dataclass(frozen=True, eq=False, kw_only=True)
class HyperWeights:
    """Learned numbers of one branch, all fp32: phi [N * C, N * (N + 2)], alphas [1], bias_pre and bias_post [N], bias_res [N, N].

    `folded` is what `fold_norm` made of phi and the norm in front of it, None where the implementation needs no such copy.
    """

    phi: Tensor
    alpha_pre: Tensor
    alpha_post: Tensor
    alpha_res: Tensor
    bias_pre: Tensor
    bias_post: Tensor
    bias_res: Tensor
    folded: Tensor | None = None


@dataclass(frozen=True, eq=False)
class HyperCoefficients:
    """`pre` [S, N] weights into the branch, `post` [S, N] out of it, `res` [S, N, N] from stream j into stream i."""

    pre: Tensor
    post: Tensor
    res: Tensor


def hyper_projection(streams: Tensor, norm_weight: Tensor, phi: Tensor, segments: ModalitySegments | None = None) -> Tensor:
    """Normalises the flattened streams in fp32 and projects them.

    Args:
        streams: [S, N, C].
        norm_weight: fp32, stored minus one; [N * C] without segments, [M * N * C] with them.
        phi: fp32 [N * C, N * (N + 2)], applied from the right.
        segments: modality runs over the S rows.

    Returns:
        fp32 [S, N * (N + 2)]: N columns for pre, N for post, N * N for res (row-major).
    """
    check_rank("streams", streams, 3)
    check_rows("streams", streams, segments)
    streams_n, width = streams.shape[1], streams.shape[1] * streams.shape[2]
    weight_blocks("norm_weight", norm_weight, segments, width)
    if tuple(phi.shape) != (width, streams_n * (streams_n + 2)) or phi.dtype != torch.float32:
        raise ValueError(f"phi is {phi.dtype} {tuple(phi.shape)}, expected float32 {(width, streams_n * (streams_n + 2))}.")
    return implementation(__name__, FILES).hyper_projection(streams, norm_weight, phi, segments)


def fold_norm(norm_weight: Tensor, phi: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Prepares phi for `hyper_mix` once, when weights are loaded: the scale (1 + w) of the norm goes into it.

    Args:
        norm_weight: fp32 [N * C] or [M * N * C], stored minus one.
        phi: fp32 [N * C, N * (N + 2)].
        dtype: type of the streams it will meet.

    Returns:
        A copy in the form of the implementation in use (3 MB a modality in the released model), None when it needs none.
    """
    if phi.shape[0] == 0 or norm_weight.shape[0] % phi.shape[0]:
        raise ValueError(f"norm_weight has {norm_weight.shape[0]} numbers, expected a multiple of the {phi.shape[0]} rows of phi.")
    return implementation(__name__, FILES).fold_norm(norm_weight, phi, dtype)


def hyper_coefficients(
    projection: Tensor, weights: HyperWeights, *, width: int, iterations: int = 20, out_dtype: torch.dtype
) -> HyperCoefficients:
    """Turns a projection into coefficients: sigmoid, 2 sigmoid, and a Sinkhorn-normalised matrix; fp32 until one rounding.

    Args:
        projection: fp32 [S, N * (N + 2)] of `hyper_projection`.
        weights: of the branch.
        width: N * C; the projection is scaled by its inverse square root.
        iterations: Sinkhorn rounds, columns before rows in each.
        out_dtype: type of the coefficients, that of the streams.
    """
    check_rank("projection", projection, 2)
    n = weights.bias_pre.shape[0]
    if projection.shape[1] != n * (n + 2):
        raise ValueError(f"projection has {projection.shape[1]} columns, expected {n * (n + 2)} for {n} streams.")
    pre, post, res = implementation(__name__, FILES).hyper_coefficients(projection, weights, width=width, iterations=iterations)
    return HyperCoefficients(pre.to(out_dtype), post.to(out_dtype), res.to(out_dtype))


def _check_mix(
    streams: Tensor, weights: HyperWeights, norm_weight: Tensor, branch_norm_weight: Tensor, segments: ModalitySegments | None
) -> None:
    check_rank("streams", streams, 3)
    check_rows("streams", streams, segments)
    n, channels = streams.shape[1:]
    for name, weight, block in (("norm_weight", norm_weight, n * channels), ("branch_norm_weight", branch_norm_weight, channels)):
        weight_blocks(name, weight, segments if weight.shape[0] != block else None, block)
    if tuple(weights.phi.shape) != (n * channels, n * (n + 2)):
        raise ValueError(f"phi has shape {tuple(weights.phi.shape)}, expected {(n * channels, n * (n + 2))}.")
    numbers = {"alpha_pre": 1, "alpha_post": 1, "alpha_res": 1, "bias_pre": n, "bias_post": n, "bias_res": n * n}
    for name, count in numbers.items():
        if getattr(weights, name).numel() != count:
            raise ValueError(f"{name} has {getattr(weights, name).numel()} numbers, expected {count} for {n} streams.")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}.")


def _check_connect(streams: Tensor, branch: Tensor, coefficients: HyperCoefficients) -> None:
    tokens, n, channels = streams.shape
    _check_shape("branch", branch, (tokens, channels))
    _check_shape("post", coefficients.post, (tokens, n))
    _check_shape("res", coefficients.res, (tokens, n, n))


def hyper_mix(
    streams: Tensor,
    weights: HyperWeights,
    norm_weight: Tensor,
    branch_norm_weight: Tensor,
    segments: ModalitySegments | None = None,
    *,
    iterations: int = 20,
) -> tuple[Tensor, HyperCoefficients]:
    """Everything in front of a branch: projection, coefficients, branch input, and the norm that every branch begins with.

    The branch input is rounded to the type of the streams before its norm, the coefficients before they are used.

    Args:
        streams: [S, N, C].
        weights: of the branch.
        norm_weight: fp32, of the norm in front of phi, stored minus one; [N * C], or [M * N * C] to choose by modality.
        branch_norm_weight: fp32, of the branch's own norm, stored minus one; [C] or [M * C].
        segments: modality runs over the S rows; needed when one of the two weights has blocks.
        iterations: Sinkhorn rounds.

    Returns:
        The normalised branch input [S, C] in the type of the streams, and the coefficients in that type for `hyper_connect`.
    """
    _check_mix(streams, weights, norm_weight, branch_norm_weight, segments)
    ops = implementation(__name__, FILES)
    normed, mix = ops.hyper_mix(streams, weights, norm_weight, branch_norm_weight, segments, iterations)
    return normed, HyperCoefficients(*mix)


def hyper_branch_input(streams: Tensor, pre: Tensor) -> Tensor:
    """Sums the streams with the weights `pre`: [S, N, C] and [S, N] to [S, C] in the type of `streams`, fp32 inside."""
    check_rank("streams", streams, 3)
    _check_shape("pre", pre, streams.shape[:2])
    return implementation(__name__, FILES).hyper_branch_input(streams, pre)


def hyper_connect(streams: Tensor, branch: Tensor, coefficients: HyperCoefficients) -> Tensor:
    """Mixes the streams by `res` and adds the branch output by `post`: fp32 accumulation, one rounding.

    Args:
        streams: [S, N, C].
        branch: [S, C].
        coefficients: made from these streams.

    Returns:
        [S, N, C], new memory.
    """
    check_rank("streams", streams, 3)
    _check_connect(streams, branch, coefficients)
    return implementation(__name__, FILES).hyper_connect(streams, branch, coefficients.post, coefficients.res)


def hyper_connect_mix(
    streams: Tensor,
    branch: Tensor,
    coefficients: HyperCoefficients,
    weights: HyperWeights,
    norm_weight: Tensor,
    branch_norm_weight: Tensor,
    segments: ModalitySegments | None = None,
    *,
    iterations: int = 20,
) -> tuple[Tensor, Tensor, HyperCoefficients]:
    """`hyper_connect` behind one branch and `hyper_mix` in front of the next, where the next follows at once.

    Args:
        streams, branch, coefficients: of `hyper_connect`.
        weights, norm_weight, branch_norm_weight, segments, iterations: of `hyper_mix`, those of the next branch.

    Returns:
        The new streams [S, N, C], then what `hyper_mix` returns for them.
    """
    _check_mix(streams, weights, norm_weight, branch_norm_weight, segments)
    _check_connect(streams, branch, coefficients)
    ops = implementation(__name__, FILES)
    mixed, normed, mix = ops.hyper_connect_mix(
        streams, branch, coefficients, weights, norm_weight, branch_norm_weight, segments, iterations
    )
    return mixed, normed, HyperCoefficients(*mix)
