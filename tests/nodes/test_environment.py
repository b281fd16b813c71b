"""The workers' Python asked for its packages, without a ComfyUI: real interpreters and scripts in their place."""

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from magi2_core.errors import DependencyError

SOURCE = Path(__file__).resolve().parents[2] / "nodes" / "environment.py"


@pytest.fixture
def environment() -> Iterator[ModuleType]:
    """nodes/environment.py alone: the folder's other modules need a ComfyUI."""
    spec = importlib.util.spec_from_file_location("magi2_environment", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    module._probe.cache_clear()


def script(path: Path, *lines: str) -> str:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return str(path)


def test_own_python_is_read_without_importing(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAGI2_PYTHON", raising=False)
    for name in ("transformers", "av"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert set(environment.worker_packages()) == set(environment.PROBED)
    assert environment.worker_packages()["torch"]
    assert environment.installed("no_such_package_at_all") is None
    assert not {"transformers", "av"} & set(sys.modules)


def test_other_python_says_what_it_has(environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    python = script(tmp_path / "python", f"echo x >> {asked}", "echo magi2 welcomes you", f'exec "{sys.executable}" "$@"')
    monkeypatch.delenv("MAGI2_PYTHON", raising=False)
    own = environment.worker_packages()
    monkeypatch.setenv("MAGI2_PYTHON", python)
    assert environment.worker_packages() == own
    environment.check_text_encoder()
    environment.worker_packages()
    if not environment.lacks(own):
        assert asked.read_text() == "x\n"
    os.utime(python, (1, 1))
    environment.worker_packages()
    assert asked.read_text().startswith("x\nx\n")


def test_empty_environment_is_told_with_both_cures(environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import venv

    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    python = str(tmp_path / "empty" / "bin" / "python")
    monkeypatch.setenv("MAGI2_PYTHON", python)
    assert environment.lacks(environment.worker_packages()) == list(environment.PROBED)
    with pytest.raises(DependencyError, match=r"has none\..*-m pip install \"transformers>=5\.5\".*python -m venv.*MAGI2_PYTHON="):
        environment.check_text_encoder()
    with pytest.raises(DependencyError, match="need torch, einops, safetensors, MAGI2_PYTHON="):
        environment.check_packages(environment.EVERY_STAGE)


@pytest.mark.parametrize("lines", [("exit 3",), ("echo hello",), ("echo magi2 {}",), ("echo magi2 [1",)])
def test_probe_that_breaks_refuses_nothing(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MAGI2_PYTHON", script(tmp_path / "python", *lines))
    assert environment.worker_packages() is None
    environment.check_text_encoder()
    environment.check_packages(environment.EVERY_STAGE)


def test_probe_that_hangs_is_ended_and_not_asked_again(environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "PROBE_SECONDS", 0.3)
    monkeypatch.setenv("MAGI2_PYTHON", script(tmp_path / "python", "exec sleep 60"))
    begun = time.monotonic()
    environment.check_text_encoder()
    environment.check_text_encoder()
    assert 0.3 <= time.monotonic() - begun < 5


def test_python_that_does_not_exist_is_named(environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MAGI2_PYTHON", str(tmp_path / "nowhere"))
    with pytest.raises(DependencyError, match=r"MAGI2_PYTHON=.*nowhere"):
        environment.check_python()
    monkeypatch.setenv("MAGI2_PYTHON", Path(sys.executable).name)
    environment.check_python()  # a name on PATH is a Python too


@pytest.mark.parametrize(
    ("version", "is_enough"), [("5.5.0", True), ("5.10", True), ("6.0.0rc1", True), ("5.4.9", False), ("4.57.0", False)]
)
def test_versions_are_numbers(environment: ModuleType, version: str, is_enough: bool) -> None:
    assert environment.lacks({"transformers": version, "torch": "1.0"}) == ([] if is_enough else ["transformers"])
