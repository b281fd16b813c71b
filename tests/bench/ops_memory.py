"""Benchmark entries of the memory-bound ops: hyper-connection, norms, rotary, swiglu, and the grouped linear beside them.

Every entry makes inputs for a number of tokens at the released width and runs the op's public function under whichever
implementation is chosen. Bytes count each input read once and each output written once.
Legend: S tokens, N streams, C channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

N, C, HEADS, HEAD, BANDS = 4, 3072, 24, 128, 96
WIDTH = N * C
SHAPES = {"272p": (31_668, 2496), "540p": (117_684, 2496), "rank": (14_712, 312)}
"""Packed tokens of both guidance branches, and how many of them are text; a rank of 8 holds one eighth (540p)."""


@dataclass(frozen=True, kw_only=True)
class MemoryOp:
    """One op: `make` inputs for (tokens, text tokens, device), `run` them, bytes a token (weights aside), relative error allowed."""

    name: str
    make: Callable[[int, int, str], dict[str, Any]]
    run: Callable[[dict[str, Any]], list[Tensor]]
    bytes_per_token: int
    tolerance: float = 5e-3
    flops_per_token: int = 0


def _rand(*shape: int, device: str, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype).mul_(scale)


def _segments(rows: int, text: int, device: str) -> Any:
    from magi2_kernels.common.segments import ModalitySegments

    # Two items of video, audio and text, as one rank or the whole sequence sees them.
    half, audio = rows // 2, min(250, rows // 8)
    runs, start = [], 0
    for length, words in ((half, text * 4 // 5), (rows - half, text - text * 4 // 5)):
        for modality, count in ((0, length - audio - words), (1, audio), (2, words)):
            runs.append((start, start + count, modality))
            start += count
    return ModalitySegments.build(runs, device=device)


def _make_hyper(rows: int, text: int, device: str, blocks: int = 1) -> dict[str, Any]:
    from magi2_kernels.common.choice import using
    from magi2_kernels.hyper_connection import HyperWeights, fold_norm, hyper_mix

    phi, norm = _rand(WIDTH, N * (N + 2), device=device, scale=0.01), _rand(blocks * WIDTH, device=device, scale=0.1)
    numbers = {f"alpha_{name}": _rand(1, device=device) for name in ("pre", "post", "res")}
    biases = {"bias_pre": _rand(N, device=device), "bias_post": _rand(N, device=device), "bias_res": _rand(N, N, device=device)}
    with using("triton"):
        folded = fold_norm(norm, phi, torch.bfloat16)
    inputs = {
        "streams": _rand(rows, N, C, device=device, dtype=torch.bfloat16),
        "branch": _rand(rows, C, device=device, dtype=torch.bfloat16),
        "weights": HyperWeights(phi=phi, folded=folded, **numbers, **biases),
        "norm": norm,
        "branch_norm": _rand(3 * C, device=device, scale=0.1),
        "segments": _segments(rows, text, device),
    }
    with using("triton"):
        inputs["mix"] = hyper_mix(inputs["streams"], inputs["weights"], norm, inputs["branch_norm"], inputs["segments"])[1]
    return inputs


def _mix(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.hyper_connection import hyper_mix

    normed, mix = hyper_mix(i["streams"], i["weights"], i["norm"], i["branch_norm"], i["segments"])
    return [normed, mix.pre, mix.post, mix.res]


def _connect(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.hyper_connection import hyper_connect

    return [hyper_connect(i["streams"], i["branch"], i["mix"])]


def _half_layer(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.hyper_connection import hyper_connect, hyper_mix

    normed, mix = hyper_mix(i["streams"], i["weights"], i["norm"], i["branch_norm"], i["segments"])
    return [normed, hyper_connect(i["streams"], i["branch"], mix)]


def _connect_mix(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.hyper_connection import hyper_connect_mix

    streams, normed, mix = hyper_connect_mix(i["streams"], i["branch"], i["mix"], i["weights"], i["norm"], i["branch_norm"], i["segments"])
    return [streams, normed, mix.pre, mix.post, mix.res]


def _make_qk(rows: int, text: int, device: str) -> dict[str, Any]:
    angles = _rand(rows, BANDS // 2, device=device)
    return {
        "qkv": _rand(rows, 3, HEADS, HEAD, device=device, dtype=torch.bfloat16),
        "weights": (_rand(HEAD, device=device, scale=0.1), _rand(HEAD, device=device, scale=0.1)),
        "rope": torch.cat([angles.sin(), angles.cos()], dim=1),
    }


def _qk(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.qk_norm_rope import qk_norm_rope

    return list(qk_norm_rope(i["qkv"][:, 0], i["qkv"][:, 1], *i["weights"], i["rope"]))


def _make_norm(rows: int, text: int, device: str) -> dict[str, Any]:
    return {
        "x": _rand(rows, C, device=device, dtype=torch.bfloat16),
        "weight": _rand(3 * C, device=device, scale=0.1),
        "segments": _segments(rows, text, device),
    }


def _norm(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.modality_rms_norm import modality_rms_norm

    return [modality_rms_norm(i["x"], i["weight"], i["segments"])]


def _swiglu(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.swiglu import swiglu7

    return [swiglu7(i["u"])]


def _make_linear(rows: int, text: int, device: str) -> dict[str, Any]:
    return {
        "x": _rand(rows, C, device=device, dtype=torch.bfloat16),
        "weight": _rand(3 * 2560, C, device=device, scale=C**-0.5, dtype=torch.bfloat16),
        "segments": _segments(rows, text, device),
    }


def _linear(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.grouped_linear import grouped_linear

    return [grouped_linear(i["x"], i["weight"], i["segments"])]


STREAMS, ROW = 2 * WIDTH, 2 * C
ENTRIES = (
    MemoryOp(name="hyper_mix", make=_make_hyper, run=_mix, bytes_per_token=2 * STREAMS + ROW),
    MemoryOp(
        name="hyper_mix, weights per modality", make=lambda r, t, d: _make_hyper(r, t, d, 3), run=_mix, bytes_per_token=2 * STREAMS + ROW
    ),
    MemoryOp(name="hyper_connect", make=_make_hyper, run=_connect, bytes_per_token=2 * STREAMS + ROW),
    MemoryOp(name="half layer", make=_make_hyper, run=_half_layer, bytes_per_token=4 * STREAMS + 2 * ROW),
    MemoryOp(name="half layer between branches", make=_make_hyper, run=_connect_mix, bytes_per_token=3 * STREAMS + 2 * ROW),
    MemoryOp(name="qk_norm_rope", make=_make_qk, run=_qk, bytes_per_token=4 * ROW + 4 * BANDS),
    MemoryOp(name="modality_rms_norm", make=_make_norm, run=_norm, bytes_per_token=2 * ROW),
    MemoryOp(
        name="swiglu7",
        make=lambda rows, text, device: {"u": _rand(rows, 5120, device=device, dtype=torch.bfloat16, scale=3.0)},
        run=_swiglu,
        bytes_per_token=3 * 5120,
    ),
    MemoryOp(
        name="grouped_linear", make=_make_linear, run=_linear, bytes_per_token=ROW + 2 * 2560, flops_per_token=2 * C * 2560, tolerance=1e-2
    ),
)
