"""Triton: contiguous reads of gate and linear pairs, split in registers."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import check_types, opaque
from ..common.tuning import pick
from .reference import ALPHA, LIMIT

TYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Results of one program, warps."""

    results: int
    warps: int


TABLE = {"interpreter": Blocks(results=32, warps=1), "default": Blocks(results=1024, warps=4)}


@triton.jit
def swiglu7_pair(gate, linear, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The activation of fp32 gate and linear values."""
    gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    linear = tl.minimum(tl.maximum(linear, -LIMIT, propagate_nan=tl.PropagateNan.ALL), LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate * tl.sigmoid(ALPHA * gate) * (linear + 1.0)


@triton.jit
def _swiglu(u_ptr, out_ptr, total, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    pair = tl.arange(0, 2 * BLOCK)
    result = tl.arange(0, BLOCK)
    left = total - start
    u = tl.load(u_ptr + 2 * start + pair, mask=pair < 2 * left, other=0.0, eviction_policy="evict_first").to(tl.float32)
    gate, linear = tl.split(tl.reshape(u, (BLOCK, 2)))
    value = swiglu7_pair(gate, linear, ALPHA, LIMIT)
    tl.store(out_ptr + start + result, value.to(out_ptr.dtype.element_ty), mask=result < left)


def _fake(u: Tensor, out_dtype: torch.dtype) -> Tensor:
    return u.new_empty(*u.shape[:-1], u.shape[-1] // 2, dtype=out_dtype)


@opaque("swiglu7", _fake)
def _run(u: Tensor, out_dtype: torch.dtype) -> Tensor:
    out = torch.empty(*u.shape[:-1], u.shape[-1] // 2, dtype=out_dtype, device=u.device)
    total = out.numel()
    tile = pick(TABLE, u.device)
    if total:
        _swiglu[(triton.cdiv(total, tile.results),)](u, out, total, ALPHA=ALPHA, LIMIT=LIMIT, BLOCK=tile.results, num_warps=tile.warps)
    return out


def swiglu7(u: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """One read and one write; a strided `u` is copied first."""
    check_types("swiglu7", TYPES, u=u)
    return _run(u.contiguous(), out_dtype)
