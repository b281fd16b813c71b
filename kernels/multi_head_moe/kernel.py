"""Triton: every tile of routes of one expert goes through both layers in one kernel, its rows are stored, a second kernel adds them.

A route's row goes to the place the route had before the sort, so the K rows of a token and head are neighbours: the sum reads them
in one stream, in fp32 and in a fixed order, which makes runs repeat bit for bit. Atomic adds into the result would save the memory of
the rows (R * d: 4.3 GB at 540p) and most of the 1.2 ms of the sum, of 30 there, but round six times to bf16 in an order that changes.
On Hopper the expert network is the kernel of the folder `hopper`; the one here runs anywhere, with tensor descriptors or plain
pointers. Measurements: tests/bench/results/moe_h200.json.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import check_types, opaque
from ..common.tuning import INTERPRETER, architecture, pick
from ..moe_routing import Routes
from ..moe_routing.kernel import plan_tiles
from . import ExpertWeights

HOPPER, DESCRIPTOR, POINTER = "hopper", "descriptor", "pointer"


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How the expert network runs: routes a tile, inner columns a step, channels a step of the first product, warps, stages, loads."""

    rows: int
    inner: int
    channels: int = 256
    warps: int
    stages: int
    loads: str = POINTER


TABLE = {
    "sm_90": Blocks(rows=128, inner=64, warps=4, stages=2, loads=HOPPER),
    "sm_100": Blocks(rows=128, inner=32, warps=8, stages=3, loads=DESCRIPTOR),
    "sm_80": Blocks(rows=64, inner=32, warps=8, stages=2),
    "mp": Blocks(rows=64, inner=64, channels=64, warps=8, stages=1),
    "interpreter": Blocks(rows=16, inner=16, channels=16, warps=1, stages=1),
    "default": Blocks(rows=64, inner=16, warps=8, stages=2),
}
"""sm_90 is measured; the others fit the shared memory of their cards and were checked for their numbers on an H200, not timed."""

SUM_TOKENS = 4
HOPPER_WIDTHS = (64, 128, 256)


@triton.jit
def _experts(
    x_ptr,
    out_ptr,
    order_ptr,
    weights_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    offsets_ptr,
    w13,
    down,
    x_token,
    x_head,
    E: tl.constexpr,
    K: tl.constexpr,
    d: tl.constexpr,
    F: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BF: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    # x_head: from the token after a head's last to the next head's first.
    # BD: power of two from d on. BC: channels a step of the first product. Descriptors only where d is BD and F a multiple of BF.
    expert = tl.load(tile_expert_ptr + tl.program_id(0))
    if expert >= 0:
        start = tl.load(tile_start_ptr + tl.program_id(0))
        end = tl.load(offsets_ptr + expert + 1)
        rows = start + tl.arange(0, BT)
        valid = rows < end
        # Places count tokens through all heads: place // K is head * S + token.
        place = tl.load(order_ptr + rows, mask=valid, other=0).to(tl.int32)
        base = x_ptr + (place // K).to(tl.int64) * x_token + (expert // E).to(tl.int64) * x_head
        channels = tl.arange(0, BD)
        result = tl.zeros([BT, BD], dtype=tl.float32)
        if BC == BD:
            x = tl.load(base[:, None] + channels[None, :], mask=valid[:, None] & (channels < d)[None, :], other=0.0)
        for f0 in tl.range(0, F, BF, num_stages=STAGES):
            both_columns = 2 * f0 + tl.arange(0, 2 * BF)
            inner = f0 + tl.arange(0, BF)
            if DESCRIPTORS:
                both = tl.dot(x, w13.load([expert * d, 2 * f0]))
                second = down.load([expert * F + f0, 0])
            else:
                first = w13 + expert.to(tl.int64) * d * (2 * F)
                if BC == BD:
                    mask = (channels < d)[:, None] & (both_columns < 2 * F)[None, :]
                    both = tl.dot(
                        x,
                        tl.load(first + channels[:, None] * (2 * F) + both_columns[None, :], mask=mask, other=0.0),
                        input_precision="ieee",
                    )
                else:
                    both = tl.zeros([BT, 2 * BF], dtype=tl.float32)
                    for c0 in tl.static_range(0, BD, BC):
                        c = c0 + tl.arange(0, BC)
                        part = tl.load(base[:, None] + c[None, :], mask=valid[:, None] & (c < d)[None, :], other=0.0)
                        mask = (c < d)[:, None] & (both_columns < 2 * F)[None, :]
                        block = tl.load(first + c[:, None] * (2 * F) + both_columns[None, :], mask=mask, other=0.0)
                        both = tl.dot(part, block, both, input_precision="ieee")
                mask = (inner < F)[:, None] & (channels < d)[None, :]
                second = tl.load(down + expert.to(tl.int64) * F * d + inner[:, None] * d + channels[None, :], mask=mask, other=0.0)
            gate, up = tl.split(tl.reshape(both, (BT, BF, 2)))
            gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
            up = tl.maximum(tl.minimum(up, 7.0, propagate_nan=tl.PropagateNan.ALL), -7.0, propagate_nan=tl.PropagateNan.ALL)
            hidden = gate * (1.0 / (1.0 + tl.exp(-1.702 * gate))) * (up + 1.0)
            result = tl.dot(hidden.to(second.dtype), second, result, input_precision="ieee")
        weight = tl.load(weights_ptr + place, mask=valid, other=0.0)
        target = out_ptr + place.to(tl.int64)[:, None] * d + channels[None, :]
        tl.store(target, (result * weight[:, None]).to(out_ptr.dtype.element_ty), mask=valid[:, None] & (channels < d)[None, :])


@triton.jit
def _sum_rows(rows_ptr, out_ptr, tokens, heads, d: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    blocks = tl.cdiv(tokens, BT)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    t = (tl.program_id(0) % blocks) * BT + tl.arange(0, BT)
    c = tl.arange(0, BD)
    mask = (t < tokens)[:, None] & (c < d)[None, :]
    first = rows_ptr + ((head * tokens + t) * K * d)[:, None] + c[None, :]
    total = tl.zeros([BT, BD], dtype=tl.float32)
    for k in tl.static_range(K):
        total += tl.load(first + k * d, mask=mask, other=0.0).to(tl.float32)
    out = out_ptr + (t.to(tl.int64) * heads + head)[:, None] * d + c[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)


def _width(d: int) -> int:
    return max(16, triton.next_power_of_2(d))


def settings(device: torch.device, d: int, inner: int) -> Blocks:
    """The row of the table for `device`, with the loads that matrices of this size allow.

    Descriptors cannot stop at the border of an expert, so they need whole blocks.
    """
    tile = pick(TABLE, device)
    if tile.loads == HOPPER and not (d in HOPPER_WIDTHS and inner % tile.inner == 0 and inner >= 2 * tile.inner):
        tile = TABLE["sm_100"]
    if tile.loads == DESCRIPTOR and not (d in HOPPER_WIDTHS and inner % tile.inner == 0):
        tile = TABLE["default"]
    return tile


def _head_step(x: Tensor) -> int:
    """Numbers from the token after a head's last to the next head's first: places count tokens through all heads."""
    return x.stride(1) - x.shape[0] * x.stride(0)


def _launch_hopper(arguments: tuple[Tensor, ...], x: Tensor, w13: Tensor, down: Tensor, tile: Blocks) -> None:
    try:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from .hopper.kernel import _experts as hopper_experts
    except ImportError as error:
        raise ImportError(
            f"the expert kernel for Hopper needs Triton 3.6 or later, found {triton.__version__} ({error}): "
            "pip install 'triton>=3.6', or build the model with the reference kernels."
        ) from None

    flat, inner, d = down.shape
    step = tile.inner
    tall = TensorDescriptor(w13, [flat * d, 2 * inner], [2 * inner, 1], [d, 2 * step], gl.NVMMASharedLayout(128, 16, 2))
    # Rows 8 b + 4 l + q of W_down come in the order (b, q, l): see the kernel.
    order = [flat * inner // 8, 4, 2, d]
    wide = TensorDescriptor(down, order, [8 * d, d, 4 * d, 1], [step // 8, 4, 2, d], gl.NVMMASharedLayout(128, 16, 4))
    sizes = {"E": flat // x.shape[1], "K": arguments[2].shape[2], "D": d, "F": inner, "BT": tile.rows, "BF": step}
    hopper_experts[(arguments[3].shape[0],)](x, *arguments, x.stride(0), _head_step(x), tall, wide, **sizes, num_warps=tile.warps)


def _launch_portable(arguments: tuple[Tensor, ...], x: Tensor, w13: Tensor, down: Tensor, tile: Blocks) -> None:
    flat, inner, d = down.shape
    width = _width(d)
    step = min(tile.inner, max(16, triton.next_power_of_2(inner)))
    use_descriptors = tile.loads == DESCRIPTOR
    first: object = w13
    second: object = down
    if use_descriptors:
        from triton.tools.tensor_descriptor import TensorDescriptor

        first = TensorDescriptor(w13, [flat * d, 2 * inner], [2 * inner, 1], [d, 2 * step])
        second = TensorDescriptor(down, [flat * inner, d], [d, 1], [step, d])
    _experts[(arguments[3].shape[0],)](
        x,
        *arguments,
        first,
        second,
        x.stride(0),
        _head_step(x),
        E=flat // x.shape[1],
        K=arguments[2].shape[2],
        d=d,
        F=inner,
        BT=tile.rows,
        BD=width,
        BF=step,
        BC=width if use_descriptors else min(tile.channels, width),
        STAGES=tile.stages,
        DESCRIPTORS=use_descriptors,
        num_warps=tile.warps,
    )


def expert_rows(x: Tensor, routes: tuple[Tensor, Tensor, Tensor], w13: Tensor, down: Tensor, tile: Blocks) -> Tensor:
    """The weighted result of every route, [R, d] in the order [G, S, K].

    Args:
        x: [S, G, d], last axis contiguous.
        routes: order, weights (contiguous), offsets, as in `Routes`.
        w13: [G * E, d, 2 * F] contiguous.
        down: [G * E, F, d] contiguous.
        tile: how to run.
    """
    order, weights, offsets = routes
    out = torch.empty(order.shape[0], x.shape[2], dtype=x.dtype, device=x.device)
    if order.shape[0]:
        expert, start = plan_tiles(offsets, order.shape[0], tile.rows)
        launch = _launch_hopper if tile.loads == HOPPER else _launch_portable
        launch((out, order, weights, expert, start, offsets), x, w13, down, tile)
    return out


def sum_rows(rows: Tensor, tokens: int, heads: int) -> Tensor:
    """Adds the K rows of each token and head in fp32: [G * S * K, d] to [S, G, d]."""
    d = rows.shape[1]
    out = torch.empty(tokens, heads, d, dtype=rows.dtype, device=rows.device)
    if tokens and heads:
        top_k = rows.shape[0] // (tokens * heads)
        grid = (heads * triton.cdiv(tokens, SUM_TOKENS),)
        _sum_rows[grid](rows, out, tokens, heads, d=d, K=top_k, BT=SUM_TOKENS, BD=_width(d), num_warps=4)
    return out


def _fake(x: Tensor, order: Tensor, weights: Tensor, offsets: Tensor, w13: Tensor, down: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@opaque("multi_head_moe", _fake)
def _moe_op(x: Tensor, order: Tensor, weights: Tensor, offsets: Tensor, w13: Tensor, down: Tensor) -> Tensor:
    if architecture(x.device) != INTERPRETER:
        check_types("multi_head_moe", (torch.bfloat16,), x=x)
    x = x if x.stride(2) == 1 else x.contiguous()
    tile = settings(x.device, x.shape[2], down.shape[1])
    return sum_rows(expert_rows(x, (order, weights.contiguous(), offsets), w13, down, tile), x.shape[0], x.shape[1])


def multi_head_moe(x: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    """As in `multi_head_moe.__init__`; bf16 only on a GPU, weights made by `ExpertWeights.packed`."""
    if weights.w13 is None or not weights.w13.is_contiguous() or not weights.down.is_contiguous():
        raise ValueError("weights have no contiguous W13 or W_down: make them with ExpertWeights.packed(pack_w13(gate, up), down).")
    return _moe_op(x, routes.order, routes.weights, routes.offsets, weights.w13, weights.down)
