"""The preview goldens on an accelerator with the Triton kernels and the attention chosen there: components, and the transformer layer by layer."""

import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from magi2_core import device as devices
from magi2_core.pipeline.accelerate import Target, choose_attention
from magi2_kernels.common import choice
from magi2_kernels.sink_attention import providers

HERE = Path(__file__).resolve().parent
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(devices.resolve().type == "cpu", reason="no accelerator")]


def sibling(name: str):
    full = f"magi2_parity_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, HERE / f"{name}.py")
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


class DeviceCase(sibling("case").Case):
    """A case whose tensors are on the accelerator."""

    @functools.cached_property
    def inputs(self):
        return {name: tensor.to(devices.resolve()) for name, tensor in super().inputs.items()}

    @functools.cached_property
    def weights(self):
        return {name: tensor.to(devices.resolve()) for name, tensor in super().weights.items()}

    @functools.cached_property
    def outputs_bf16(self):
        return {name: tensor.to(devices.resolve()) for name, tensor in super().outputs_bf16.items()}


def cases(root: Path) -> list[Path]:
    folders = sorted(path.parent for path in (root / "preview").rglob("case.json"))
    return [folder for folder in folders if sibling("case").Case(folder).kind in ("preview_component", "preview_transformer")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_preview_goldens(golden_root: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    case_module, kind, device = sibling("case"), sibling("kind_preview"), devices.resolve()
    devices.use_full_fp32()
    found = cases(golden_root)
    assert found, f"no goldens under {golden_root}"
    build = kind.CuSeqlens.build
    monkeypatch.setattr(kind.CuSeqlens, "build", classmethod(lambda cls, ends, where=device: build(ends, device)))
    missed = []
    for folder in found:
        case = DeviceCase(folder)
        if dtype == torch.bfloat16 and not case.spec.get("compare_bf16"):
            continue
        width = case.model_config.get("head_dim", 128) if case.config.get("model_config") else 128
        attention = choose_attention("auto", Target(device=device, dtype=dtype, head_dim=width), "triton").name
        with choice.using("triton"), providers.using(attention), torch.no_grad(), device:
            produced = kind.run_bf16(case) if dtype == torch.bfloat16 else kind.run(case)
        if produced is None:
            continue
        produced = {name: tensor.cpu() for name, tensor in produced.items()}
        rules = case.spec["compare_bf16"] if dtype == torch.bfloat16 else case.spec["compare"]
        golden = {name: tensor.cpu() for name, tensor in (case.outputs_bf16 if dtype == torch.bfloat16 else case.outputs).items()}
        report = case_module.compare(case, produced, {name: rule for name, rule in rules.items() if name in produced}, golden)
        print(folder.name, attention, *report.lines, sep="\n  ")
        missed += [f"{folder.name}: {line}" for line in report.lines if line.startswith("MISS")]
    assert not missed, "\n".join(missed)
