"""One function a provider of providers.py: packed rows in, attention and its log-sum out. Imported packages are found by name only.

Legend: S rows, H heads, Dh head width. Every function: q, k, v [S, H, Dh] (v may be a strided view), `cu` int32 on the device,
`ends` the same numbers on the host, to [S, H, Dh] in the type of q and fp32 [H, S].
"""

import importlib
import itertools
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..common.sequences import CuSeqlens
from . import reference as exact
from .providers import FA3_MODULES, MATE_MODULE, first_module

SHORT = 32
"""Sequences of fewer rows (padding is one) take the exact path: libraries compute them in tiles they do not fill, or refuse them."""

One = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""One sequence: q, k, v [n, H, Dh] and scale to [n, H, Dh] and fp32 [H, n]."""


def reference(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, ends: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    """Exact fp32 softmax."""
    out, lse = exact.packed_attention(q, k, v, CuSeqlens(tuple(ends), cu), scale=scale)
    return out, lse.t().contiguous()


def fa3(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, ends: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    """All sequences in one call of FlashAttention-3."""
    module = first_module(FA3_MODULES)
    assert module is not None, "the provider was chosen, so its package was there"
    return _varlen(module, q, k, v, cu, ends, scale)


def mate(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, ends: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    """All sequences in one call of MATE's FlashAttention-3 interface; never run by us."""
    return _varlen(MATE_MODULE, q, k, v, cu, ends, scale)


def cudnn(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, ends: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    """One call of cuDNN a sequence."""
    return _each(_cudnn_one, q, k, v, ends, scale)


def flash(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, ends: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    """One call of PyTorch's FlashAttention a sequence."""
    return _each(_flash_cpu_one if q.device.type == "cpu" else _flash_one, q, k, v, ends, scale)


def flex(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, ends: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    """One call of FlexAttention a sequence."""
    return _each(_flex_one, q, k, v, ends, scale)


def _varlen(module: str, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, ends: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    if ends[-1] == 0:
        return torch.empty_like(q), q.new_empty((q.shape[1], 0), dtype=torch.float32)
    longest = max(stop - start for start, stop in _bounds(ends))
    function = importlib.import_module(module).flash_attn_varlen_func
    out, lse = function(q, k, v, cu, cu, longest, longest, softmax_scale=scale, causal=False, return_attn_probs=True)
    return out, lse


def _bounds(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(ends))


def _each(one: One, q: Tensor, k: Tensor, v: Tensor, ends: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    for start, stop in _bounds(ends):
        rows = slice(start, stop)
        if stop == start:
            continue
        if stop - start < SHORT:
            found, log_sum = exact.packed_attention(q[rows], k[rows], v[rows], _single(stop - start), scale=scale)
            out[rows], lse[:, rows] = found, log_sum.t()
        else:
            out[rows], lse[:, rows] = one(q[rows], k[rows], v[rows], scale)
    return out, lse


def _single(rows: int) -> CuSeqlens:
    return CuSeqlens.build((0, rows))


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def _cudnn_one(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = op(_heads_first(q), _heads_first(k), _heads_first(v), None, True, 0.0, False, False, scale=scale)
    return out[0].transpose(0, 1), lse.reshape(q.shape[1], q.shape[0])


def _flash_one(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._flash_attention_forward
    rows = q.shape[0]
    out, lse, *_ = op(q[None], k[None], v[None], None, None, rows, rows, 0.0, False, False, scale=scale)
    return out[0], lse[0, :, :rows]


def _flash_cpu_one(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(_heads_first(q), _heads_first(k), _heads_first(v), 0.0, False, scale=scale)
    return out[0].transpose(0, 1), lse[0]


@cache
def _flex_function(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Lengths change with the prompt: dynamic, so that a request of another length does not compile again.
    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention


def _flex_one(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    from torch.nn.attention import flex_attention as module

    function = _flex_function(q.device.type != "cpu")
    heads = (_heads_first(q), _heads_first(k), _heads_first(v))
    with warnings.catch_warnings():
        # On the CPU it is not compiled, on purpose.
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        if hasattr(module, "AuxRequest"):
            out, found = function(*heads, scale=scale, return_aux=module.AuxRequest(lse=True))
            return out[0].transpose(0, 1), found.lse[0]
        out, lse = function(*heads, scale=scale, return_lse=True)  # torch before 2.9
        return out[0].transpose(0, 1), lse[0]
