"""How a Triton launcher becomes an op: argument checks before the launch, and registration so that torch.compile passes it as one node.

A launcher is a plain function of tensors and numbers that allocates its results and starts a kernel. Outside a compiled region it is
called directly, which spares every launch the dispatcher of a registered op.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library

from .segments import ModalitySegments


def opaque(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a launcher as the op `magi2_kernels::name`.

    Args:
        name: unique among the ops.
        fake: same signature, returns empty results of the right shapes and types without reading data.
    """

    def register(launcher: Callable[..., Any]) -> Callable[..., Any]:
        op = library.custom_op(f"magi2_kernels::{name}", launcher, mutates_args=())
        op.register_fake(fake)

        def call(*args: Any) -> Any:
            return op(*args) if torch.compiler.is_compiling() else launcher(*args)

        return call

    return register


def check_types(op: str, types: tuple[torch.dtype, ...], **tensors: Tensor) -> None:
    """Raises ValueError when a tensor has another type than those."""
    for label, tensor in tensors.items():
        if tensor.dtype not in types:
            expected = ", ".join(str(kind) for kind in types)
            raise ValueError(
                f"{op}: {label} is {tensor.dtype}, the Triton kernel takes {expected}. Use the reference kernels for other types."
            )


def norm_scale(op: str, weight: Tensor) -> Tensor:
    """A norm's weight as the kernels read it, contiguous. Raises ValueError on a type that is not fp32."""
    check_types(op, (torch.float32,), weight=weight)
    return weight.contiguous()


def modality_ids(weight: Tensor, segments: ModalitySegments | None, block: int) -> Tensor | None:
    """The modality of every row when `weight` holds several blocks of `block` numbers, None when it holds one."""
    return segments.ids if segments is not None and weight.shape[0] != block else None
