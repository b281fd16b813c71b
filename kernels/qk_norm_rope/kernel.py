"""Triton: one program a token takes all its heads of q and k; table row and norm scales are read once for them.

A head is read as its three parts (first of the pairs, second of the pairs, rest), so every access is contiguous and nothing is read twice.
"""

# Triton joins tuples with + only, and a tuple grows in a loop:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import check_types, opaque
from ..common.segments import ModalitySegments
from ..common.tuning import pick
from .reference import EPS

TYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Heads taken at once, warps."""

    heads: int
    warps: int


TABLE = {"interpreter": Blocks(heads=4, warps=1), "default": Blocks(heads=8, warps=4)}


@triton.jit
def _read(
    x_ptr, stride, H: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    # All heads of a token from x_ptr on, as three tuples of tiles: first of the pairs, second of the pairs, rest.
    pair = tl.arange(0, BH)
    rest = tl.arange(0, BR)
    firsts, seconds, thirds = (), (), ()
    for start in tl.static_range(0, H, BLOCK):
        head = start + tl.arange(0, BLOCK)
        mask = (head < H)[:, None] & (pair < HALF)[None, :]
        base = x_ptr + head[:, None] * stride
        firsts = firsts + (tl.load(base + pair[None, :], mask=mask, other=0.0),)
        seconds = seconds + (tl.load(base + HALF + pair[None, :], mask=mask, other=0.0),)
        mask_rest = (head < H)[:, None] & (rest < WIDTH - 2 * HALF)[None, :]
        thirds = thirds + (tl.load(base + 2 * HALF + rest[None, :], mask=mask_rest, other=0.0),)
    return firsts, seconds, thirds


@triton.jit
def _turn(
    firsts,
    seconds,
    thirds,
    out_ptr,
    weight_ptr,
    sin,
    cos,
    EPS: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    BH: tl.constexpr,
    BR: tl.constexpr,
):
    # Norm, rotation and stores of what `_read` returned; weight_ptr is the block of the token's modality.
    kind = out_ptr.dtype.element_ty
    pair = tl.arange(0, BH)
    rest = tl.arange(0, BR)
    paired = pair < HALF
    resting = rest < WIDTH - 2 * HALF
    if NORM:
        scale_first = 1.0 + tl.load(weight_ptr + pair, mask=paired, other=0.0)
        scale_second = 1.0 + tl.load(weight_ptr + HALF + pair, mask=paired, other=0.0)
        scale_rest = 1.0 + tl.load(weight_ptr + 2 * HALF + rest, mask=resting, other=0.0)
    for tile in tl.static_range((H + BLOCK - 1) // BLOCK):
        head = tile * BLOCK + tl.arange(0, BLOCK)
        first = firsts[tile].to(tl.float32)
        second = seconds[tile].to(tl.float32)
        third = thirds[tile].to(tl.float32)
        if NORM:
            total = tl.sum(first * first + second * second, axis=1) + tl.sum(third * third, axis=1)
            inverse = tl.rsqrt(total / WIDTH + EPS)[:, None]
            first = first * inverse * scale_first[None, :]
            second = second * inverse * scale_second[None, :]
            third = third * inverse * scale_rest[None, :]
        mask = (head < H)[:, None] & paired[None, :]
        out = out_ptr + head[:, None] * WIDTH
        tl.store(out + pair[None, :], (first * cos[None, :] - second * sin[None, :]).to(kind), mask=mask)
        tl.store(out + HALF + pair[None, :], (second * cos[None, :] + first * sin[None, :]).to(kind), mask=mask)
        tl.store(out + 2 * HALF + rest[None, :], third.to(kind), mask=(head < H)[:, None] & resting[None, :])


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
    BLOCK: tl.constexpr,
    BH: tl.constexpr,
    BR: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BH)
    sin = tl.load(rope_ptr + token * rope_stride + pair, mask=pair < HALF, other=0.0)
    cos = tl.load(rope_ptr + token * rope_stride + HALF + pair, mask=pair < HALF, other=1.0)
    if PER_MODALITY:
        block = tl.load(ids_ptr + token).to(tl.int64) * WIDTH
    else:
        block = token * 0
    # Everything is read before anything is written: a store would hold back the loads behind it.
    firsts, seconds, thirds = _read(q_ptr + token * q_token, q_head, HQ, WIDTH, HALF, BLOCK, BH, BR)
    if HK > 0:
        k_firsts, k_seconds, k_thirds = _read(k_ptr + token * k_token, k_head, HK, WIDTH, HALF, BLOCK, BH, BR)
    _turn(
        firsts, seconds, thirds, q_out_ptr + token * (HQ * WIDTH), q_weight_ptr + block, sin, cos, EPS, HQ, WIDTH, HALF, NORM, BLOCK, BH, BR
    )  # fmt: skip
    if HK > 0:
        _turn(
            k_firsts, k_seconds, k_thirds, k_out_ptr + token * (HK * WIDTH), k_weight_ptr + block, sin, cos,
            EPS, HK, WIDTH, HALF, NORM, BLOCK, BH, BR,
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
            BLOCK=tile.heads, BH=triton.next_power_of_2(max(1, half)), BR=triton.next_power_of_2(max(1, width - 2 * half)), num_warps=tile.warps,
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
    return x if x.stride(-1) == 1 else x.contiguous()


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
    q_out, k_out = _run_pair(_dense(q), _dense(k), q_weight, k_weight, _dense(rope.float()), ids, out_dtype)
    return q_out, k_out
