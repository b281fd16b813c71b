"""Out-of-memory errors become ours, with advice; deterministic mode is a block."""

import pytest
import torch

from magi2_core.errors import OutOfMemoryError, RequestError
from magi2_core.pipeline.guards import deterministic, memory_guard

CPU = torch.device("cpu")


def test_memory_guard_translates_the_allocators_error() -> None:
    wanted = r"preview: cpu ran out of memory \(CUDA out of memory.*272p would fit"
    with pytest.raises(OutOfMemoryError, match=wanted), memory_guard("preview", CPU, lambda: "272p would fit."):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore lines")


def test_memory_guard_translates_the_hosts_error() -> None:
    with pytest.raises(OutOfMemoryError, match="decode"), memory_guard("decode", CPU, lambda: "smaller"):
        raise MemoryError
    with pytest.raises(OutOfMemoryError, match="decode"), memory_guard("decode", CPU, lambda: "smaller"):
        torch.empty(1 << 46, dtype=torch.float64)


def test_memory_guard_passes_other_errors() -> None:
    for error in (RequestError("size"), RuntimeError("shape mismatch"), KeyError("x")):
        with pytest.raises(type(error)), memory_guard("preview", CPU, lambda: "never"):
            raise error
    with memory_guard("preview", CPU, lambda: "never"):
        pass


def test_deterministic_restores_after_an_error() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError), deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        raise RuntimeError
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic(False):
            assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
