"""Triton: the passes over the streams around a branch, and what launches them.

In front of a branch: projection with coefficients (kernel_projection.py), branch input with its norm. Behind it: connect. Where another
branch follows, its projection runs in the pass that connects, which saves a read of the streams. Measurements:
tests/bench/results/ops_h200.json.
"""

# Triton joins tuples with + only, and a tuple grows in a loop:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import check_types, modality_ids, norm_scale, opaque
from ..common.segments import ModalitySegments
from ..common.tuning import architecture, pick
from . import kernel_projection as passes
from .reference import EPS, SINKHORN_EPS

if TYPE_CHECKING:
    from . import HyperCoefficients, HyperWeights

TYPES = (torch.bfloat16, torch.float32)
MAX_STREAMS = 4
"""What the settings by card are made for; more streams, which no release has, take the row "wide" of PROJECT and separate passes."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Tokens and channels of a tile, warps, pipeline stages."""

    rows: int
    cols: int
    warps: int
    stages: int = 1


# One setting an architecture, whatever the number of tokens: the sums of a row must not depend on how many rows there are.
PROJECT = {
    "sm_90": Blocks(rows=128, cols=128, warps=8, stages=4),
    "interpreter": Blocks(rows=16, cols=32, warps=1),
    "default": Blocks(rows=64, cols=64, warps=4, stages=3),
    "wide": Blocks(rows=64, cols=32, warps=4, stages=2),
}
COEFFICIENTS = {"interpreter": Blocks(rows=4, cols=1, warps=1), "default": Blocks(rows=128, cols=1, warps=4)}
BRANCH_INPUT = {"interpreter": Blocks(rows=2, cols=16, warps=1), "default": Blocks(rows=1, cols=512, warps=4)}
# Connect and project in one pass, on cards where it was measured to be faster than two, and for bf16. Pieces of a row shorter than 64
# channels cost more than the pass saves.
CONNECT_PROJECT = {"sm_90": Blocks(rows=64, cols=64, warps=8, stages=3), "interpreter": Blocks(rows=16, cols=32, warps=1)}
CONNECT = {"interpreter": Blocks(rows=2, cols=16, warps=1), "default": Blocks(rows=2, cols=1024, warps=4)}


@triton.jit(do_not_specialize=["S"])
def _branch_input(
    streams_ptr, pre_ptr, weight_ptr, ids_ptr, out_ptr, S, stride, pre_stride, C: tl.constexpr, N: tl.constexpr, EPS: tl.constexpr,
    NORM: tl.constexpr, PER_MODALITY: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = (C + COLS - 1) // COLS
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < S
    row_ptr = streams_ptr + rows.to(tl.int64)[:, None] * stride
    out_row = out_ptr + rows.to(tl.int64)[:, None] * C
    kind = out_ptr.dtype.element_ty
    pre = ()
    for s in tl.static_range(N):
        pre = pre + (tl.load(pre_ptr + rows.to(tl.int64) * pre_stride + s, mask=live, other=0.0).to(tl.float32),)
    parts = ()
    # Squares are summed by lane first: a reduction in every piece would keep the loads of the next one waiting.
    squares = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for chunk in tl.static_range(CHUNKS):
        c = chunk * COLS + tl.arange(0, COLS)
        mask = live[:, None] & (c < C)[None, :]
        x = tl.zeros([ROWS, COLS], dtype=tl.float32)
        for s in tl.static_range(N):
            stream = tl.load(row_ptr + s * C + c[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            x += pre[s][:, None] * stream.to(tl.float32)
        x = x.to(kind).to(tl.float32)
        squares += x * x
        parts = parts + (x,)
    if NORM:
        inverse = tl.rsqrt(tl.sum(squares, axis=1) / C + EPS)
        if PER_MODALITY:
            first = tl.load(ids_ptr + rows, mask=live, other=0).to(tl.int64)[:, None] * C
        for chunk in tl.static_range(CHUNKS):
            c = chunk * COLS + tl.arange(0, COLS)
            mask = live[:, None] & (c < C)[None, :]
            if PER_MODALITY:
                scale = 1.0 + tl.load(weight_ptr + first + c[None, :], mask=mask, other=0.0, eviction_policy="evict_last")
            else:
                scale = 1.0 + tl.load(weight_ptr + c, mask=c < C, other=0.0, eviction_policy="evict_last")[None, :]
            tl.store(out_row + c[None, :], (parts[chunk] * inverse[:, None] * scale).to(kind), mask=mask)
    else:
        for chunk in tl.static_range(CHUNKS):
            c = chunk * COLS + tl.arange(0, COLS)
            tl.store(out_row + c[None, :], parts[chunk].to(kind), mask=live[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=["S"])
def _connect(
    streams_ptr, branch_ptr, post_ptr, res_ptr, out_ptr, S, stride, branch_stride, post_stride, res_stride, C: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wide = rows.to(tl.int64)
    live = rows < S
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = live[:, None] & (c < C)[None, :]
    kind = out_ptr.dtype.element_ty
    streams = ()
    for s in tl.static_range(N):
        x = tl.load(streams_ptr + wide[:, None] * stride + (s * C + c)[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        streams = streams + (x.to(tl.float32),)
    x = tl.load(branch_ptr + wide[:, None] * branch_stride + c[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    branch = x.to(tl.float32)
    for i in tl.static_range(N):
        mixed = tl.zeros([ROWS, COLS], dtype=tl.float32)
        for s in tl.static_range(N):
            weight = tl.load(res_ptr + wide * res_stride + i * N + s, mask=live, other=0.0).to(tl.float32)
            mixed += weight[:, None] * streams[s]
        weight = tl.load(post_ptr + wide * post_stride + i, mask=live, other=0.0).to(tl.float32)
        mixed += weight[:, None] * branch
        tl.store(out_ptr + wide[:, None] * (N * C) + (i * C + c)[None, :], mixed.to(kind), mask=mask)


def _padded(n: int) -> int:
    """Side of the square of coefficients as the kernels hold it: a power of two, at least 4 so that a product has 16 columns."""
    return max(4, triton.next_power_of_2(n))


def fold_norm(norm_weight: Tensor, phi: Tensor, dtype: torch.dtype) -> Tensor:
    """(1 + w) * phi per modality, [M, N * C, P]: columns res (padded to a square), pre, post; for bf16 the high and then the low parts."""
    check_types("hyper_connection", TYPES, streams=torch.empty(0, dtype=dtype))
    width, columns = phi.shape
    n = math.isqrt(columns + 1) - 1
    side = _padded(n)
    scaled = (1.0 + norm_weight.float().view(-1, width, 1)) * phi
    pre, post, res = scaled.split([n, n, n * n], dim=2)
    folded = scaled.new_zeros(scaled.shape[0], width, 2, side, side)
    folded[:, :, 0, :n, :n] = res.unflatten(2, (n, n))
    folded[:, :, 1, 0, :n] = pre
    folded[:, :, 1, 1, :n] = post
    folded = folded.flatten(2)
    if dtype == torch.float32:
        return folded
    high = folded.to(dtype)
    return torch.cat([high, (folded - high.float()).to(dtype)], dim=2)


def _rows(streams: Tensor) -> Tensor:
    """Raises when a row of the streams is not one piece of memory."""
    if streams.stride(2) != 1 or streams.stride(1) != streams.shape[2]:
        raise ValueError(f"streams has strides {streams.stride()}: the channels of a row must be contiguous. Pass streams.contiguous().")
    return streams


def _fake_project(streams: Tensor, folded: Tensor, ids: Tensor | None, numbers: list[Tensor], iterations: int) -> Tensor:
    n = streams.shape[1]
    return streams.new_empty(streams.shape[0], n * (n + 2), dtype=streams.dtype if numbers else torch.float32)


@opaque("hyper_project", _fake_project)
def _run_project(streams: Tensor, folded: Tensor, ids: Tensor | None, numbers: list[Tensor], iterations: int) -> Tensor:
    """With six `numbers` (alphas, biases) the coefficients in the type of the streams, without them the fp32 projection."""
    rows, n, channels = streams.shape
    width = n * channels
    out = torch.empty(rows, n * (n + 2), dtype=streams.dtype if numbers else torch.float32, device=streams.device)
    # fp32 streams take twice the shared memory, more streams a wider phi.
    is_wide = n > MAX_STREAMS or (streams.dtype == torch.float32 and streams.device.type != "cpu")
    tile = PROJECT["wide"] if is_wide else pick(PROJECT, streams.device)
    arguments: list[Tensor | None] = [*numbers] or [None] * 6
    if rows:
        passes.project[(triton.cdiv(rows, tile.rows),)](
            _rows(streams), folded, ids, out, *arguments, rows, streams.stride(0),
            WIDTH=width, EPS=EPS, SCALE=1.0 / math.sqrt(width), SINK_EPS=SINKHORN_EPS, N=n, NP=_padded(n), ITERATIONS=iterations,
            COEFFICIENTS=bool(numbers), PER_MODALITY=ids is not None, MODALITIES=folded.shape[0],
            PARTS=1 if streams.dtype == torch.float32 else 2, ROWS=tile.rows, COLS=tile.cols, STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
    return out


@opaque("hyper_coefficients", lambda projection, numbers, width, iterations: torch.empty_like(projection))
def _run_coefficients(projection: Tensor, numbers: list[Tensor], width: int, iterations: int) -> Tensor:
    rows, n = projection.shape[0], numbers[3].shape[0]
    out = torch.empty_like(projection)
    tile = pick(COEFFICIENTS, projection.device)
    if rows:
        passes.coefficients[(triton.cdiv(rows, tile.rows),)](
            projection, out, *numbers, rows,
            SCALE=1.0 / math.sqrt(width), SINK_EPS=SINKHORN_EPS, N=n, NP=_padded(n), ITERATIONS=iterations, ROWS=tile.rows, num_warps=tile.warps,
        )  # fmt: skip
    return out


@opaque("hyper_branch_input", lambda streams, pre, weight, ids: streams.new_empty(streams.shape[0], streams.shape[2]))
def _run_branch_input(streams: Tensor, pre: Tensor, weight: Tensor | None, ids: Tensor | None) -> Tensor:
    rows, n, channels = streams.shape
    out = torch.empty(rows, channels, dtype=streams.dtype, device=streams.device)
    tile = pick(BRANCH_INPUT, streams.device)
    if rows:
        _branch_input[(triton.cdiv(rows, tile.rows),)](
            _rows(streams), pre, weight, ids, out, rows, streams.stride(0), pre.stride(0),
            C=channels, N=n, EPS=EPS, NORM=weight is not None, PER_MODALITY=ids is not None,
            ROWS=tile.rows, COLS=tile.cols, num_warps=tile.warps,
        )  # fmt: skip
    return out


@opaque("hyper_connect", lambda streams, branch, post, res: streams.new_empty(streams.shape))
def _run_connect(streams: Tensor, branch: Tensor, post: Tensor, res: Tensor) -> Tensor:
    rows, n, channels = streams.shape
    out = torch.empty(rows, n, channels, dtype=streams.dtype, device=streams.device)
    tile = pick(CONNECT, streams.device)
    if rows:
        _connect[(triton.cdiv(rows, tile.rows), triton.cdiv(channels, tile.cols))](
            _rows(streams), branch, post, res, out, rows, streams.stride(0), branch.stride(0), post.stride(0), res.stride(0),
            C=channels, N=n, ROWS=tile.rows, COLS=tile.cols, num_warps=tile.warps,
        )  # fmt: skip
    return out


def _fake_connect_project(
    streams: Tensor, branch: Tensor, post: Tensor, res: Tensor, folded: Tensor, ids: Tensor | None, numbers: list[Tensor], iterations: int
) -> list[Tensor]:
    n = streams.shape[1]
    return [streams.new_empty(streams.shape), streams.new_empty(streams.shape[0], n * (n + 2))]


def _one_pass(streams: Tensor) -> Blocks | None:
    """The setting for connect and project in one pass, None where two are taken."""
    tile = CONNECT_PROJECT.get(architecture(streams.device))
    fits = streams.shape[1] <= MAX_STREAMS and (streams.dtype == torch.bfloat16 or streams.device.type == "cpu")
    return tile if fits else None


@opaque("hyper_connect_project", _fake_connect_project)
def _run_connect_project(
    streams: Tensor, branch: Tensor, post: Tensor, res: Tensor, folded: Tensor, ids: Tensor | None, numbers: list[Tensor], iterations: int
) -> list[Tensor]:
    """The new streams and the coefficients made from them, in the type of the streams."""
    tile = _one_pass(streams)
    if tile is None:
        mixed = _run_connect(streams, branch, post, res)
        return [mixed, _run_project(mixed, folded, ids, numbers, iterations)]
    rows, n, channels = streams.shape
    width = n * channels
    mixed = torch.empty(rows, n, channels, dtype=streams.dtype, device=streams.device)
    out = torch.empty(rows, n * (n + 2), dtype=streams.dtype, device=streams.device)
    if rows:
        passes.connect_project[(triton.cdiv(rows, tile.rows),)](
            _rows(streams), branch, post, res, mixed, folded, ids, out, *numbers, rows,
            streams.stride(0), branch.stride(0), post.stride(0), res.stride(0),
            C=channels, EPS=EPS, SCALE=1.0 / math.sqrt(width), SINK_EPS=SINKHORN_EPS, N=n, NP=_padded(n), ITERATIONS=iterations,
            PER_MODALITY=ids is not None, MODALITIES=folded.shape[0], PARTS=1 if streams.dtype == torch.float32 else 2,
            ROWS=tile.rows, COLS=tile.cols, STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
    return [mixed, out]


def _numbers(weights: "HyperWeights") -> list[Tensor]:
    found = (weights.alpha_pre, weights.alpha_post, weights.alpha_res, weights.bias_pre, weights.bias_post, weights.bias_res)
    return [numbers.contiguous() for numbers in found]


def _parts(packed: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a coefficient row: pre, post, res."""
    pre, post, res = packed.split([n, n, n * n], dim=1)
    return pre, post, res.unflatten(1, (n, n))


def hyper_projection(streams: Tensor, norm_weight: Tensor, phi: Tensor, segments: ModalitySegments | None) -> Tensor:
    """Folds on the spot; `hyper_mix` takes a folded phi."""
    check_types("hyper_projection", TYPES, streams=streams)
    folded = fold_norm(norm_weight, phi, streams.dtype)
    return _run_project(streams, folded, segments.ids if segments is not None else None, [], 0)


def hyper_coefficients(projection: Tensor, weights: "HyperWeights", *, width: int, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """The three sets in fp32."""
    check_types("hyper_coefficients", (torch.float32,), projection=projection)
    packed = _run_coefficients(projection.contiguous(), _numbers(weights), width, iterations)
    return _parts(packed, weights.bias_pre.shape[0])


def hyper_branch_input(streams: Tensor, pre: Tensor) -> Tensor:
    """One rounding."""
    check_types("hyper_branch_input", TYPES, streams=streams)
    return _run_branch_input(streams, pre if pre.stride(1) == 1 else pre.contiguous(), None, None)


def _folded(streams: Tensor, weights: "HyperWeights", norm_weight: Tensor) -> Tensor:
    """The folded phi for these streams, made on the spot when the weights carry none."""
    n, channels = streams.shape[1:]
    folded = weights.folded if weights.folded is not None else fold_norm(norm_weight, weights.phi, streams.dtype)
    wanted = (norm_weight.shape[0] // (n * channels), n * channels)
    if folded.dtype != streams.dtype or tuple(folded.shape[:2]) != wanted:
        raise ValueError(f"folded phi is {folded.dtype} {tuple(folded.shape)}, expected {streams.dtype} {wanted}: fold it for this weight.")
    return folded


def hyper_mix(
    streams: Tensor,
    weights: "HyperWeights",
    norm_weight: Tensor,
    branch_norm_weight: Tensor,
    segments: ModalitySegments | None,
    iterations: int,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Normalised branch input, and the coefficients as views of one tensor."""
    check_types("hyper_mix", TYPES, streams=streams)
    n, channels = streams.shape[1:]
    folded = _folded(streams, weights, norm_weight)
    packed = _run_project(streams, folded, modality_ids(norm_weight, segments, n * channels), _numbers(weights), iterations)
    mix = _parts(packed, n)
    normed = _run_branch_input(
        streams, mix[0], norm_scale("hyper_mix", branch_norm_weight), modality_ids(branch_norm_weight, segments, channels)
    )
    return normed, mix


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
    """New streams, then what `hyper_mix` makes of them."""
    check_types("hyper_connect_mix", TYPES, streams=streams, branch=branch)
    n, channels = streams.shape[1:]
    folded, ids = _folded(streams, weights, norm_weight), modality_ids(norm_weight, segments, n * channels)
    mixed, packed = _run_connect_project(
        streams, *_dense(branch, coefficients.post, coefficients.res), folded, ids, _numbers(weights), iterations
    )
    mix = _parts(packed, n)
    normed = _run_branch_input(
        mixed, mix[0], norm_scale("hyper_connect_mix", branch_norm_weight), modality_ids(branch_norm_weight, segments, channels)
    )
    return mixed, normed, mix


def _dense(branch: Tensor, post: Tensor, res: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with contiguous rows."""
    post = post if post.stride(1) == 1 else post.contiguous()
    res = res if res.stride(2) == 1 and res.stride(1) == res.shape[2] else res.contiguous()
    return branch if branch.stride(1) == 1 else branch.contiguous(), post, res


def hyper_connect(streams: Tensor, branch: Tensor, post: Tensor, res: Tensor) -> Tensor:
    """One rounding."""
    check_types("hyper_connect", TYPES, streams=streams, branch=branch)
    return _run_connect(streams, *_dense(branch, post, res))
