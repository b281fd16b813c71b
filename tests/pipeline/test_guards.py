"""Out-of-memory errors become ours, with advice; deterministic mode is a block."""

import weakref
from pathlib import Path

import pytest
import torch

from magi2_core.errors import OutOfMemoryError, RequestError
from magi2_core.pipeline import guards
from magi2_core.pipeline.guards import check_host_memory, deterministic, host_memory_left, let_go, memory_guard

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


def test_memory_guard_lets_go_of_what_the_failed_frames_held() -> None:
    """Their tensors are the memory that the next stage needs, and a captured graph among them would keep process groups from closing."""
    seen = []

    def stage() -> None:
        held = torch.zeros(3)
        seen.append(weakref.ref(held))
        raise MemoryError

    with pytest.raises(OutOfMemoryError) as caught, memory_guard("decode", CPU, lambda: "smaller"):
        stage()
    assert caught.value.__context__ is not None and seen[0]() is None


def test_let_go_reaches_causes_and_contexts() -> None:
    seen = []

    def fail(error: Exception) -> None:
        held = torch.zeros(3)
        seen.append(weakref.ref(held))
        raise error

    def chain() -> None:
        try:
            fail(KeyError("context"))
        except KeyError:
            try:
                fail(ValueError("cause"))
            except ValueError as cause:
                raise RuntimeError("last") from cause

    with pytest.raises(RuntimeError) as caught:
        chain()
    assert all(held() is not None for held in seen)
    let_go(caught.value)
    assert [held() for held in seen] == [None, None]


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


def test_host_memory_left_counts_the_containers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "MEMORY_FILE", tmp_path / "meminfo")
    monkeypatch.setattr(guards, "CGROUP", tmp_path)
    assert host_memory_left() is None
    check_host_memory(1 << 60, "a clip", "Smaller.")  # nothing is known
    (tmp_path / "meminfo").write_text("MemTotal:  9000000 kB\nMemAvailable:    5000000 kB\n")
    assert host_memory_left() == 5_000_000 * 1024
    for name, text in (("memory.max", "max"), ("memory.current", "3000000000"), ("memory.stat", "anon 5\ninactive_file 1000000000\n")):
        (tmp_path / name).write_text(text)
    assert host_memory_left() == 5_000_000 * 1024
    (tmp_path / "memory.max").write_text("4000000000\n")
    assert host_memory_left() == 2_000_000_000
    with pytest.raises(OutOfMemoryError, match=r"a clip needs 6.0 GB of this machine's memory, 2.0 GB are left. Smaller\."):
        check_host_memory(6_000_000_000, "a clip", "Smaller.")
