"""The benchmark code itself, on the CPU at a tiny size: layer and step are built and checked as on a GPU; the front refuses a red op."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from magi2_core.config import PreviewConfig


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    """Imports a file of this folder as the front does: from the folder itself."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__).parent == Path(__file__).parent:
            del sys.modules[name]


def test_compare_layer_of_the_plain_kernels_are_equal_and_small(bench) -> None:
    whole = bench("whole")
    torch.manual_seed(0)
    for index in (0, 1):
        made = whole.layer(index, config=whole.small_config(), device="cpu")
        found = whole.compare_layer(made, index, config=whole.small_config(), device="cpu")
        assert torch.equal(found.chosen, found.plain) and 1e-4 < found.error(found.plain) < 0.1


def test_experts_fixed_leaves_rounding_only(bench) -> None:
    whole = bench("whole")
    torch.manual_seed(0)
    config = whole.small_config()
    made = whole.layer(1, config=config, device="cpu")
    bias = made.mlp.moe_mlp.router.expert_bias_ema.clone()
    with whole.experts_fixed(made):
        x = torch.randn(30, config.moe.num_heads, config.moe_head_dim).bfloat16()
        chosen = made.mlp.moe_mlp.router(x, made.mlp.moe_mlp.gate).ids
        assert (chosen.sort(-1).values == chosen[:, :1].sort(-1).values).all()
        found = whole.compare_layer(made, 1, config=config, device="cpu")
    assert 1e-4 < found.error(found.plain) < 2e-2 and torch.equal(made.mlp.moe_mlp.router.expert_bias_ema, bias)


def test_compare_layer_sees_a_wrong_layer(bench) -> None:
    whole = bench("whole")
    torch.manual_seed(0)
    made = whole.layer(1, config=whole.small_config(), device="cpu")
    right = made.attention.core
    # Wrong only under the kernels chosen now: the first of the two runs of the bf16 layer.
    calls = []

    def wrong_at_first(*arguments):
        calls.append(1)
        return right(*arguments) * (1.5 if len(calls) == 1 else 1)

    made.attention.core = wrong_at_first
    found = whole.compare_layer(made, 1, config=whole.small_config(), device="cpu")
    assert found.error(found.chosen) > 2 * found.error(found.plain)


def test_step_cycles_over_distinct_layers(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bench("whole")
    monkeypatch.setattr(whole, "NEGATIVE", 3)
    monkeypatch.setattr(whole, "AUDIO", 7)
    made = whole.model("272p", config=whole.small_config(), device="cpu")
    assert (len(made[0].block.layers), *made[1:]) == (4, 1, 2)
    step = whole.step("272p", made, text=5, grid=(2, 3, 4))
    found = step()
    assert found.video_cond.shape == (1, 48, 2, 3, 4) and torch.isfinite(found.audio_uncond).all()


def test_released_layer_counts(bench) -> None:
    whole = bench("whole")
    with torch.device("meta"):
        from magi2_core.model.block import PreviewLayer

        made = PreviewLayer(PreviewConfig(), whole.MOE_LAYER, torch.bfloat16)
    assert sum(parameter.numel() for parameter in made.parameters()) == pytest.approx(3.125e9, rel=1e-3)
    # 6.2 + 5.1 + 4.5 TFLOP at 272p: the bounds of the two branches, as counted from the released code.
    context = SimpleNamespace(cu_seqlens=SimpleNamespace(total=31_668, bounds=((0, 16_634), (16_634, 31_668))))
    assert whole.layer_flops(context) == pytest.approx(15.8e12, rel=2e-2)


def test_run_entry_refuses_a_red_op(bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run, registry = bench("run"), bench("registry")
    monkeypatch.setattr(run.measure, "timed", lambda *_, **__: pytest.fail("a red op was timed"))
    entry = registry.Entry(name="wrong", make=lambda shape: None, run=lambda i: [], check=lambda i: 0.5, tolerance=0.1)
    monkeypatch.setattr("magi2_kernels.common.choice.choose", lambda name: None)
    assert run.run_entry(entry, "272p", None, {}) is False
    assert "REFUSED: error 5.00e-01 above 1e-01" in capsys.readouterr().out
    nan = registry.Entry(name="nan", make=lambda shape: None, run=lambda i: [], check=lambda i: float("nan"), tolerance=0.1)
    assert run.run_entry(nan, "272p", None, {}) is False


def test_probe_finds_a_wrong_head(bench) -> None:
    ops = bench("ops_attention")
    from magi2_kernels.common.sequences import CuSeqlens
    from magi2_kernels.sink_attention import packed_attention

    q, k, v = torch.randn(3, 90, 2, 16).unbind(0)
    inputs = {"q": q, "k": k, "v": v, "cu_seqlens": CuSeqlens.build((0, 50, 90))}
    assert ops.probe(inputs, packed_attention) < 1e-5

    def wrong(*arguments):
        out, lse = packed_attention(*arguments)
        out[:, 1] *= 1.02
        return out, lse

    assert ops.probe(inputs, wrong) > 1e-2


def test_fleet_step_on_gloo_ranks(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parent / "fleet_step.py"), "--device", "cpu", "--out", str(tmp_path / "found.json")]
    done = subprocess.run([*command, "--shape", "share", "--launch", "eager", "--runs", "3"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["layout"] == "cp2ep2" and found["ranks"] == 2 and found["card"] == "cpu"
    row = found["shapes"]["share"]["eager"]
    assert row["runs"] == 3 and 0 < row["min"] <= row["ms"] <= row["max"] and row["difference"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message is for machines without a GPU")
@pytest.mark.parametrize("name", ["run", "verify"])
def test_without_a_gpu_one_line_says_so(name: str) -> None:
    result = subprocess.run([sys.executable, str(Path(__file__).parent / f"{name}.py")], capture_output=True, text=True)
    assert result.returncode == 2 and "benchmarks need a GPU" in result.stderr and "Traceback" not in result.stderr
