"""Facts of Moore Threads cards as code: simulated in a process of its own, since torch's device names cannot be taken back."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from magi2_core import device

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = """
import importlib.util, sys, types
spec = importlib.util.spec_from_file_location("packages", sys.argv[1])
packages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(packages)
packages.register()
import torch
from magi2_core import device
from magi2_core.errors import DependencyError, RequestError

torch.utils.rename_privateuse1_backend("musa")
torch.version.musa = "4.3.0"
assert not torch.cuda.is_available()
sys.modules["torchada"] = None
try:
    device.resolve("auto")
except DependencyError as error:
    assert "pip install torchada" in str(error)
else:
    raise AssertionError("torchada was not asked for")
sys.modules["torchada"] = types.ModuleType("torchada")
calls = []
properties = types.SimpleNamespace(name="MTT S5000", major=3, minor=1)
torch.musa = types.SimpleNamespace(
    device_count=lambda: 2, get_device_properties=lambda index: properties, mem_get_info=lambda index: (70 << 30, 80 << 30),
    set_device=lambda chosen: calls.append(("set", chosen)), synchronize=lambda chosen: calls.append(("wait", chosen)),
)
assert device.is_musa() and device.prepare_platform() == "musa" and not torch.cuda.is_available()
assert [(info.kind, info.index, info.architecture) for info in device.list_devices()] == [("musa", 0, "musa"), ("musa", 1, "musa")]
first, second = device.resolve("auto"), device.resolve("musa:1")
assert (first.type, first.index, second.index) == ("musa", 0, 1)
try:
    device.resolve("musa:2")
except RequestError as error:
    assert "2 musa device(s)" in str(error)
else:
    raise AssertionError("a device that is not there was accepted")
assert device.collective_backend(second) == "mccl"
assert device.process_group_backend(second) == "cpu:gloo,musa:mccl"
assert device.default_dtype(second) == torch.bfloat16
device.set_device(second)
device.synchronize(second)
assert calls == [("set", second), ("wait", second)]
print("done")
"""


def test_musa_platform_simulated() -> None:
    command = [sys.executable, "-c", SIMULATED, str(ROOT / "magi2_core" / "packages.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip().endswith("done"), done.stderr


@pytest.mark.parametrize(
    ("name", "library", "backend"),
    [("cpu", "gloo", "gloo"), ("cuda", "nccl", "cpu:gloo,cuda:nccl"), ("cuda:1", "nccl", "cpu:gloo,cuda:nccl")],
)
def test_collective_library_by_device(name: str, library: str, backend: str) -> None:
    assert device.collective_backend(torch.device(name)) == library
    assert device.process_group_backend(torch.device(name)) == backend


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_all_finite_sees(bad: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.tensor([1.0, -3e38, 0.0, -0.0], dtype=dtype)
        assert device.all_finite(tensor)
        assert not device.all_finite(torch.cat([tensor, torch.tensor([bad], dtype=dtype)]))
    assert device.all_finite(torch.zeros(0))


def test_device_code_avoids_what_musa_lacks() -> None:
    """No atomic addition (there is none in bf16 before Triton-MUSA 3.6) and no isfinite where tensors may be on a card."""
    folders = [ROOT / "kernels", *(ROOT / "magi2_core" / name for name in ("model", "sampling", "parallel"))]
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(sources) > 40
    pattern = re.compile(r"\batomic_\w+\(|(?<!math)\.isfinite\(")
    assert not [f"{path.name}: {found.group()}" for path in sources for found in pattern.finditer(path.read_text())]
