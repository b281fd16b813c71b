"""A golden case folder: its case.json, configuration and tensors, and the comparison by its rules.

`case.json` holds kind, required, compare {tensor: {"rel_l2": x} | {"max_abs": x} | "equal" | "ignore"} and, for some kinds,
compare_bf16. `outputs.safetensors` is the fp32 oracle, `outputs_bf16.safetensors` the bf16 one (over the fp32 values).
A text rule ("equal" on a file name) compares the file's exact characters.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from magi2_core.request import GuidanceOptions

GUIDANCE_NAMES = {
    "start_frame_trick": "use_cfg_trick",
    "start_frames": "cfg_trick_start_frame",
    "start_frame_scale": "cfg_trick_value",
    "dynamic": "use_dynamic_cfg",
    "dynamic_below_timestep": "dynamic_cfg_start_t",
    "dynamic_scale": "dynamic_cfg_cutoff_value",
    "skimmed": "use_skimmed_cfg_linear",
    "skimmed_scale": "skimmed_cfg_scale",
    "rescale": "cfg_rescale",
}
"""Field of GuidanceOptions -> its name in an evaluation config."""


@dataclass(frozen=True)
class Case:
    """One folder."""

    folder: Path

    @cached_property
    def spec(self) -> dict[str, Any]:
        return json.loads((self.folder / "case.json").read_text())

    @property
    def kind(self) -> str:
        return self.spec["kind"]

    @property
    def required(self) -> bool:
        return bool(self.spec.get("required", True))

    @cached_property
    def config(self) -> dict[str, Any]:
        path = self.folder / "config.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    @property
    def evaluation(self) -> dict[str, Any]:
        """Sampler settings: a section of their own, else the configuration itself."""
        return {**self.config, **self.config.get("evaluation_config", {})}

    @property
    def guidance(self) -> GuidanceOptions:
        """The guidance options that the case names; the others as released."""
        said = self.evaluation
        return GuidanceOptions(**{field: said[name] for field, name in GUIDANCE_NAMES.items() if said.get(name) is not None})

    @cached_property
    def model_config(self) -> dict[str, Any]:
        """The architecture a preview case points to with "model_config"."""
        return json.loads((self.folder / self.config["model_config"]).read_text())

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        path = self.folder / "inputs.safetensors"
        return load_file(path) if path.is_file() else {}

    @property
    def weights_path(self) -> Path:
        own = self.folder / "weights.safetensors"
        return own if own.is_file() else self.folder / self.config["weights"]

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        return load_file(self.weights_path)

    @cached_property
    def outputs(self) -> dict[str, Tensor]:
        golden: dict[str, Tensor] = {}
        for path in sorted(self.folder.glob("outputs*.safetensors")):
            if path.name != "outputs_bf16.safetensors":
                golden.update(load_file(path))
        return golden

    @cached_property
    def outputs_bf16(self) -> dict[str, Tensor]:
        path = self.folder / "outputs_bf16.safetensors"
        return load_file(path) if path.is_file() else {}


@dataclass
class Report:
    """Lines a person reads and the number of misses."""

    lines: list[str] = field(default_factory=list)
    misses: int = 0

    def add(self, ok: bool, text: str) -> None:
        self.lines.append(f"{'ok  ' if ok else 'MISS'} {text}")
        self.misses += not ok


def _compare_tensor(report: Report, name: str, rule: Any, got: Tensor, want: Tensor) -> None:
    if got.shape != want.shape:
        report.add(False, f"{name}: shape {tuple(got.shape)}, golden {tuple(want.shape)}")
    elif want.numel() == 0:
        report.add(True, f"{name}: empty")
    elif rule == "equal":
        differ = int((got.long() != want.long()).sum())
        report.add(differ == 0, f"{name}: {differ} of {want.numel()} differ")
    else:
        error = got.double() - want.double()
        if "rel_l2" in rule:
            value, limit = (error.norm() / want.double().norm().clamp_min(1e-30)).item(), rule["rel_l2"]
        else:
            value, limit = error.abs().max().item(), rule["max_abs"]
        report.add(value <= limit, f"{name}: {next(iter(rule))} {value:.2e} (limit {limit:.2e})")


def compare(case: Case, produced: dict[str, Any], rules: dict[str, Any], golden: dict[str, Tensor]) -> Report:
    """Applies `rules`; a golden tensor that was not produced is a miss."""
    report = Report()
    for name, rule in rules.items():
        if rule == "ignore":
            continue
        if name not in produced:
            report.add(False, f"{name}: not produced")
        elif isinstance(produced[name], str):
            with open(case.folder / name, encoding="utf-8", newline="") as handle:
                report.add(produced[name] == handle.read(), f"{name}: text")
        else:
            _compare_tensor(report, name, rule, produced[name], golden[name])
    return report
