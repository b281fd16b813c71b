"""The adapters read what a case says: a case that says something else gives something else."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("magi2_parity_adapters", HERE / "run.py")
parity = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(parity)

PREVIEW = HERE / "golden" / "preview"


def changed(tmp_path: Path, name: str, **values) -> Path:
    """A copy of a preview case whose config.json has other values."""
    for part in (name, "model"):
        shutil.copytree(PREVIEW / part, tmp_path / part)
    path = tmp_path / name / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps(config))
    return tmp_path / name


def missed(folder: Path) -> set[str]:
    """Names of the fp32 tensors that differ from the golden ones."""
    return {line.split()[1].rstrip(":") for line in parity.run_case(folder)[0].lines if line.startswith("MISS")}


@pytest.mark.parametrize(
    "values",
    [
        {"use_cfg_trick": True, "cfg_trick_start_frame": 1, "cfg_trick_value": 2.0},
        {"use_dynamic_cfg": True, "dynamic_cfg_start_t": 1001, "dynamic_cfg_cutoff_value": 2.0},
        {"use_skimmed_cfg_linear": True, "skimmed_cfg_scale": 3.0},
        {"evaluation_config": {"cfg_rescale": 0.7}},
    ],
    ids=["trick", "dynamic", "skimmed", "rescale"],
)
def test_guidance_options_of_a_case_are_used(tmp_path: Path, values: dict) -> None:
    misses = missed(changed(tmp_path, "e_denoise_t2v_4", **values))
    assert "final_latent" in misses and "step_00_cfg_video" in misses
    assert "step_00_pred_video" not in misses and "sigmas" not in misses


def test_guidance_options_that_are_null_change_nothing(tmp_path: Path) -> None:
    assert not missed(changed(tmp_path, "e_denoise_t2v_4", use_cfg_trick=False, cfg_trick_value=None))


@pytest.mark.parametrize(("shift", "other"), [(3.0, {"s4", "refiner5"}), ({"s4": 3.0}, {"s4"})])
def test_shift_of_a_schedule_case_is_used(tmp_path: Path, shift, other: set[str]) -> None:
    misses = missed(changed(tmp_path, "d_scheduler", shift=shift))
    assert {tag for tag in ("s4", "refiner5") if f"{tag}_sigmas" in misses} == other


def test_a_case_that_cannot_be_run_is_a_miss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = changed(tmp_path, "d_scheduler", shift="wide")
    assert parity.main(["--quiet", str(broken), str(PREVIEW / "c_proxy_t2v")]) == 1
    out = capsys.readouterr().out
    assert "MISS ValueError" in out and f"{PREVIEW / 'c_proxy_t2v'}: ok" in out and "2 cases, 1 misses" in out
