"""What surrounds a stage: deterministic algorithms on request, and out-of-memory errors that say what would fit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from magi2_core.device import empty_cache, is_out_of_memory, peak_bytes
from magi2_core.errors import Magi2Error, OutOfMemoryError

from .placement import gigabytes


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Runs a block with torch's deterministic algorithms when `on`, and restores the setting of before."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if on:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


@contextmanager
def memory_guard(stage: str, device: torch.device, advice: Callable[[], str]) -> Iterator[None]:
    """Turns the allocator's error into OutOfMemoryError with `advice()`; the device's caches are freed first, so the next stage can run."""
    text = ""
    peak_bytes(device, reset=True)
    try:
        yield
    except Magi2Error:
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) and not isinstance(error, MemoryError):
            raise
        text = str(error).splitlines()[0] if str(error) else "the host is out of memory"
    if text:
        # Raised outside the handler: the failed frames, which hold the tensors, are gone by then.
        peak = peak_bytes(device)
        empty_cache(device)
        used = f" after a peak of {gigabytes(peak)}" if peak else ""
        raise OutOfMemoryError(f"{stage}: {device} ran out of memory{used} ({text}). {advice()}")
