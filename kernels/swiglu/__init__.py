"""Clamped SwiGLU ("swiglu7"): gate and linear half in interleaved columns, fp32 arithmetic, one rounding (spec preview.md 3.9)."""

import torch
from torch import Tensor

from ..common.choice import implementation

FILES = {"reference": "reference", "triton": "kernel"}


def swiglu7(u: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Activates the even columns of `u` (gate) and multiplies by one plus the odd columns (linear).

    Args:
        u: [..., 2 * F], any floating type.
        out_dtype: type of the result; that of `u` when None.

    Returns:
        [..., F].
    """
    if u.shape[-1] % 2:
        raise ValueError(f"u has {u.shape[-1]} columns, expected an even number: gate and linear columns alternate.")
    return implementation(__name__, FILES).swiglu7(u, out_dtype=out_dtype or u.dtype)
