"""Triton: one program a token takes all its heads of q and k; table row and norm scales are read once for them.

A head is two tiles of half its width: the first and the second channels of the pairs, and beside them the channels that pass through,
half in each. So both have a full power of two of columns at the released width of 128, one sum, and no piece is read twice.
"""

# Triton joins tuples with + only, and a tuple grows in a loop:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import check_types, norm_scale, opaque
from ..common.segments import ModalitySegments
from ..common.tuning import pick
from .reference import EPS

TYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Heads taken at once, warps."""

    heads: int
    warps: int


TABLE = {"sm_90": Blocks(heads=4, warps=4), "interpreter": Blocks(heads=4, warps=1), "default": Blocks(heads=8, warps=4)}


@triton.jit
def _columns(WIDTH: tl.constexpr, HALF: tl.constexpr, VEC: tl.constexpr, BW: tl.constexpr):
    # Where the two tiles of a head lie: column j < HALF of each is a pair, the others are channels that pass through, half of them in each.
    W: tl.constexpr = (WIDTH + 1) // 2
    j = tl.arange(0, BW)
    turning = j < HALF
    left = tl.where(turning, j, j + HALF)
    right = tl.where(turning, j + HALF, j + W)
    # VEC divides HALF and W: pieces of VEC columns are pieces of VEC channels, which the compiler cannot see through `where`.
    left = tl.max_contiguous(tl.multiple_of(left, VEC), VEC)
    right = tl.max_contiguous(tl.multiple_of(right, VEC), VEC)
    return left, right, j < W, j < W - WIDTH % 2, turning


@triton.jit
def _read(x_ptr, stride, H: tl.constexpr, left, right, live, live_right, BLOCK: tl.constexpr):
    # All heads of a token from x_ptr on, as two tuples of tiles.
    lefts, rights = (), ()
    for start in tl.static_range(0, H, BLOCK):
        head = start + tl.arange(0, BLOCK)
        base = x_ptr + head[:, None] * stride
        lefts = lefts + (tl.load(base + left[None, :], mask=(head < H)[:, None] & live[None, :], other=0.0),)
        rights = rights + (tl.load(base + right[None, :], mask=(head < H)[:, None] & live_right[None, :], other=0.0),)
    return lefts, rights


@triton.jit
def _turn(
    lefts, rights, out_ptr, weight_ptr, sin, cos, left, right, live, live_right,
    EPS: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Norm, rotation and stores of what `_read` returned; weight_ptr is the block of the token's modality.
    kind = out_ptr.dtype.element_ty
    if NORM:
        scale_left = 1.0 + tl.load(weight_ptr + left, mask=live, other=0.0)
        scale_right = 1.0 + tl.load(weight_ptr + right, mask=live_right, other=0.0)
    for tile in tl.static_range((H + BLOCK - 1) // BLOCK):
        head = tile * BLOCK + tl.arange(0, BLOCK)
        first = lefts[tile].to(tl.float32)
        second = rights[tile].to(tl.float32)
        if NORM:
            inverse = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / WIDTH + EPS)[:, None]
            first = first * inverse * scale_left[None, :]
            second = second * inverse * scale_right[None, :]
        out = out_ptr + head[:, None] * WIDTH
        turned = (first * cos[None, :] - second * sin[None, :]).to(kind)
        tl.store(out + left[None, :], turned, mask=(head < H)[:, None] & live[None, :])
        turned = (second * cos[None, :] + first * sin[None, :]).to(kind)
        tl.store(out + right[None, :], turned, mask=(head < H)[:, None] & live_right[None, :])


@triton.jit
def _norm_rope(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    q_weight_ptr,
    k_weight_ptr,
    rope_ptr,
    ids_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    rope_stride,
    EPS: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    PER_MODALITY: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    BW: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    left, right, live, live_right, turning = _columns(WIDTH, HALF, VEC, BW)
    # Channels that pass through turn by nothing (where its neighbour is infinite, NaN).
    j = tl.arange(0, BW)
    sin = tl.load(rope_ptr + token * rope_stride + j, mask=turning, other=0.0)
    cos = tl.load(rope_ptr + token * rope_stride + HALF + j, mask=turning, other=1.0)
    if PER_MODALITY:
        block = tl.load(ids_ptr + token).to(tl.int64) * WIDTH
    else:
        block = token * 0
    # Everything is read before anything is written: a store would hold back the loads behind it.
    lefts, rights = _read(q_ptr + token * q_token, q_head, HQ, left, right, live, live_right, BLOCK)
    if HK > 0:
        k_lefts, k_rights = _read(k_ptr + token * k_token, k_head, HK, left, right, live, live_right, BLOCK)
    _turn(
        lefts, rights, q_out_ptr + token * (HQ * WIDTH), q_weight_ptr + block, sin, cos, left, right, live, live_right,
        EPS, HQ, WIDTH, NORM, BLOCK,
    )  # fmt: skip
    if HK > 0:
        _turn(
            k_lefts, k_rights, k_out_ptr + token * (HK * WIDTH), k_weight_ptr + block, sin, cos, left, right, live, live_right,
            EPS, HK, WIDTH, NORM, BLOCK,
        )  # fmt: skip


def _launch(q: Tensor, k: Tensor | None, weights: tuple[Tensor, Tensor] | None, rope: Tensor, ids: Tensor | None, kind: torch.dtype):
    tokens, heads, width = q.shape
    half = rope.shape[1] // 2
    outs = [torch.empty(x.shape, dtype=kind, device=q.device) for x in (q, k) if x is not None]
    tile = pick(TABLE, q.device)
    other = q if k is None else k
    q_weight, k_weight = weights or (rope, rope)
    if q.numel():
        _norm_rope[(tokens,)](
            q, other, outs[0], outs[-1], q_weight, k_weight, rope, ids, q.stride(0), q.stride(1), other.stride(0), other.stride(1), rope.stride(0),
            EPS=EPS, HQ=heads, HK=0 if k is None else k.shape[1], WIDTH=width, HALF=half, NORM=weights is not None, PER_MODALITY=ids is not None,
            VEC=math.gcd(16, half, (width + 1) // 2), BLOCK=tile.heads, BW=triton.next_power_of_2((width + 1) // 2), num_warps=tile.warps,
        )  # fmt: skip
    return outs


def _fake_pair(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, rope: Tensor, ids: Tensor | None, kind: torch.dtype
) -> list[Tensor]:
    return [q.new_empty(q.shape, dtype=kind), k.new_empty(k.shape, dtype=kind)]


@opaque("qk_norm_rope", _fake_pair)
def _run_pair(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, rope: Tensor, ids: Tensor | None, kind: torch.dtype
) -> list[Tensor]:
    return _launch(q, k, (q_weight, k_weight), rope, ids, kind)


def _fake_rope(x: Tensor, rope: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


@opaque("apply_rope", _fake_rope)
def _run_rope(x: Tensor, rope: Tensor) -> Tensor:
    return _launch(x, None, None, rope, None, torch.float32)[0]


def _dense(x: Tensor) -> Tensor:
    # Also where a head's place in a token does not fit the 32 bits that the kernel counts it with.
    fits = x.ndim < 3 or (x.shape[1] - 1) * x.stride(1) < 2**31
    return x if x.stride(-1) == 1 and fits else x.contiguous()


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """fp32 result."""
    check_types("apply_rope", TYPES, x=x)
    return _run_rope(_dense(x), _dense(rope.float()))


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, rope: Tensor, segments: ModalitySegments | None, *, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Both in one launch."""
    check_types("qk_norm_rope", TYPES, q=q, k=k)
    ids = None if segments is None else segments.ids
    q_weight, k_weight = (norm_scale("qk_norm_rope", weight) for weight in (q_weight, k_weight))
    q_out, k_out = _run_pair(_dense(q), _dense(k), q_weight, k_weight, _dense(rope.float()), ids, out_dtype)
    return q_out, k_out
