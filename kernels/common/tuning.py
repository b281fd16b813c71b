"""Which card a tensor is on, as the key of the tuning tables, and how a table is read.

Every op keeps its table of launch settings beside its kernel, keyed by the names returned here; `default` is the row of the
cards nobody measured, small enough for 99 KB of shared memory.
"""

from collections.abc import Mapping
from functools import cache
from typing import TypeVar

import torch

INTERPRETER = "interpreter"
DEFAULT = "default"
SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "mp": 196_608}
"""Shared memory one block may take where it is more than the 101,376 bytes of all other cards."""
SMALLEST_SHARED = 101_376
T = TypeVar("T")


@cache
def _target(index: int) -> str:
    import triton

    target = triton.runtime.driver.active.get_current_target()
    return "mp" if target.backend.startswith("mu") else f"sm_{target.arch}"


def is_interpreted() -> bool:
    """Whether Triton kernels run on the CPU, interpreted (TRITON_INTERPRET=1)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def architecture(device: torch.device) -> str:
    """Name of the card's architecture: "sm_90", ..., "mp" for Moore Threads, or "interpreter" for CPU tensors under TRITON_INTERPRET=1.

    Raises RuntimeError for CPU tensors otherwise.
    """
    if device.type != "cpu":
        return _target(device.index or 0)
    if not is_interpreted():
        raise RuntimeError("Triton kernels got CPU tensors: move them to the GPU, or build the model with the reference kernels.")
    return INTERPRETER


def pick(table: Mapping[str, T], device: torch.device) -> T:
    """The row of `table` for `device`, its `default` row for a card without one."""
    return table.get(architecture(device), table[DEFAULT])


def shared_bytes(name: str) -> int:
    """Shared memory in bytes one block may take on architecture `name`."""
    return SHARED_BYTES.get(name, SMALLEST_SHARED)
