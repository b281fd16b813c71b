"""Which library computes the packed attention: chosen once when a model is built, by name or by `resolve("auto")`, never switched.

| name | what it is | where it was run |
| --- | --- | --- |
| fa3 | FlashAttention-3, package fa3-fwd (or a build of its authors): all sequences in one call | H200 |
| mate | the same interface by MATE, package flash_attn_3 of Moore Threads | never: written from its documentation |
| cudnn | cuDNN through PyTorch, one call a sequence | H200 |
| flash | PyTorch's own FlashAttention (2 on a GPU), one call a sequence | H200, CPU |
| flex | FlexAttention: compiled on a GPU, plain on the CPU (small inputs only), one call a sequence | H200, CPU |
| reference | reference.py: exact fp32, slow | everywhere |

All give the natural-log sum of exponentials. Times on one H200: tests/bench/results/SUMMARY.md.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.choice import Choice

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Sequence[int], float], tuple[Tensor, Tensor]]
"""q, k, v [S, H, Dh], cu_seqlens int32 tensor, the same numbers on the host, scale; gives [S, H, Dh] and fp32 [H, S]."""

FA3_MODULES = ("fa3_fwd_interface", "flash_attn_interface")
MATE_MODULE = "flash_attn_interface"
MUSA_PACKAGE = "torch_musa"
MATE_INSTALL = "pip install flash_attn_3 --index-url https://dl.mthreads.com/repo/api/pypi/pypi/simple"


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the model will call attention with."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the card; (0, 0) on the CPU and on cards that have none."""
        if self.device.type == "cpu" or is_musa():
            return (0, 0)
        return torch.get_device_module(self.device).get_device_capability(self.device)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The provider `name` and, in words, why it and not one before it in the order."""

    name: str
    reason: str


def is_musa() -> bool:
    """Whether this torch runs on Moore Threads cards."""
    return importlib.util.find_spec(MUSA_PACKAGE) is not None


def first_module(names: Sequence[str]) -> str | None:
    """The first of these modules that is installed."""
    return next((name for name in names if importlib.util.find_spec(name) is not None), None)


def _half(target: Target, most: int) -> str | None:
    if target.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16, this model is {str(target.dtype).removeprefix('torch.')}: use attention 'reference'"
    if target.head_dim % 8 or target.head_dim > most:
        return f"it takes head widths that are multiples of 8 up to {most}, this model has {target.head_dim}: use attention 'reference'"
    return None


ON_CPU = "it needs a GPU, this runs on the CPU: use attention 'auto'"


def _fa3(target: Target) -> str | None:
    if target.device.type == "cpu":
        return ON_CPU
    if target.capability[0] != 9:
        return "it needs a Hopper card (compute capability 9): use attention 'cudnn' or 'flash'"
    if first_module(FA3_MODULES) is None:
        return "its package is not installed: pip install fa3-fwd"
    if target.dtype != torch.bfloat16:
        return _half(target, 256) or "the package fa3-fwd is built for bfloat16 only: use attention 'cudnn'"
    return _half(target, 256)


def _mate(target: Target) -> str | None:
    if not is_musa() or target.device.type == "cpu":
        return "it needs a Moore Threads card: use attention 'auto'"
    if first_module((MATE_MODULE,)) is None:
        return f"its package is not installed: {MATE_INSTALL}"
    return _half(target, 256)


def _cudnn(target: Target) -> str | None:
    if target.device.type == "cpu":
        return ON_CPU
    if target.capability[0] < 8:
        return "it needs a card of compute capability 8 or more: use attention 'reference'"
    if not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN: use attention 'flash'"
    return _half(target, 128)


def _flash(target: Target) -> str | None:
    if target.device.type == "cpu":
        return None
    if target.capability[0] < 8:
        return "it needs a card of compute capability 8 or more: use attention 'reference'"
    return _half(target, 256)


def _flex(target: Target) -> str | None:
    if target.device.type == "cpu":
        return None
    if target.head_dim < 16:
        return f"it takes head widths from 16 on, this model has {target.head_dim}: use attention 'reference'"
    return None if importlib.util.find_spec("triton") else "it needs the package triton: pip install triton"


CHECKS: dict[str, Callable[[Target], str | None]] = {
    "fa3": _fa3,
    "mate": _mate,
    "cudnn": _cudnn,
    "flash": _flash,
    "flex": _flex,
    "reference": lambda target: None,
}
"""Each gives the reason why the provider cannot serve a target, with what to do, or None."""

AUTO_ORDER = ("fa3", "mate", "cudnn", "flash", "reference")
"""Fastest first, as measured on an H200; flex is slower than cudnn there and is used when it is asked for."""


def resolve(name: str, target: Target) -> Resolved:
    """The provider for `name`; "auto" takes the first in AUTO_ORDER that can serve, on the CPU the reference.

    Raises ValueError on an unknown name, RuntimeError when the one asked for cannot serve, saying what to install or use.
    """
    if name == "auto":
        if target.device.type == "cpu":
            return Resolved(name="reference", reason="CPU")
        reasons: list[str] = []
        for candidate in AUTO_ORDER:
            missing = CHECKS[candidate](target)
            if missing is None:
                return Resolved(name=candidate, reason="; ".join(reasons) or "fastest")
            reasons.append(f"not {candidate}: {missing}")
    if name not in CHECKS:
        raise ValueError(f"attention {name!r} is unknown. Use auto, {', '.join(CHECKS)}.")
    missing = CHECKS[name](target)
    if missing is not None:
        raise RuntimeError(f"attention {name!r} cannot be used here: {missing}.")
    return Resolved(name=name, reason="asked for")


_choice = Choice("attention", tuple(CHECKS))
choose, chosen, using = _choice.choose, _choice.chosen, _choice.using
"""Which provider `packed_attention` of this process uses, as `resolve` gave it."""


def provider_function() -> Attend:
    """The function of the provider in use."""
    module = importlib.import_module(f"{__package__}.libraries")
    return getattr(module, chosen())
