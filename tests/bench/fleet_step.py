"""A step of the released size on several cards: `python tests/bench/fleet_step.py --out FILE [--ranks 2] [--shape ...] [--launch ...]`.

Each rank is a process with its share of the tokens, heads and experts (the layout a fleet of so many cards takes), random weights, few
distinct layers cycled over. "272p" and "540p" are the real requests. "share" is a smaller picture, whose tokens on two ranks are as many
as 272p leaves each of eight: there the host's time to queue a layer shows. The launches must give the same velocities. With --device cpu
a small model runs on gloo.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import measure

measure.register()

import torch  # noqa: E402
import whole  # noqa: E402
from torch import Tensor  # noqa: E402

GRIDS = {"272p": None, "540p": None, "share": (whole.FRAMES, 8, 12)}
TEXT = {"272p": whole.TEXT, "540p": whole.TEXT, "share": 512}
LAYERS, LIMIT = 4, 2e-2
"""Distinct MoE layers a rank holds; relative difference of two launches (kernels are the same, so it is nearly nothing)."""


def share_of(made: Any, groups: Any) -> None:
    """Leaves a rank its MoE heads of a whole model and fills the seams, as loading with slices does."""
    from magi2_core.model.moe import MultiHeadMoE
    from magi2_core.parallel.apply import apply_parallel

    for module in {id(module): module for module in made.modules() if isinstance(module, MultiHeadMoE)}.values():
        held = module.gate.shape[0] // groups.expert.size
        rows = slice(held * groups.expert.place, held * (groups.expert.place + 1))
        for name in ("gate", "W13", "W_down"):
            setattr(module, name, torch.nn.Parameter(getattr(module, name)[rows].clone(), requires_grad=False))
        module.router.expert_bias_ema = torch.nn.Parameter(module.router.expert_bias_ema[rows].clone(), requires_grad=False)
        module.prepare(made.dtype)
    apply_parallel(made, groups)


def velocities(step: Any, timestep: int) -> Tensor:
    """Everything a step gives, flat."""
    found = step(timestep)
    parts = (found.video_cond, found.audio_cond, found.video_uncond, found.audio_uncond)
    return torch.cat([part.float().flatten() for part in parts])


def timed_launch(step: Any, groups: Any, device: torch.device, runs: int) -> dict[str, Any]:
    """Milliseconds of a step, and of the host's part of it: medians, the ranks starting together."""
    from magi2_core.device import synchronize
    from magi2_core.parallel.collectives import barrier

    whole_ms, host_ms = [], []
    for _ in range(runs):
        synchronize(device)
        barrier(groups.world)
        begun = time.perf_counter()
        step(700)
        host_ms.append((time.perf_counter() - begun) * 1e3)
        synchronize(device)
        whole_ms.append((time.perf_counter() - begun) * 1e3)
    return {
        "ms": statistics.median(whole_ms),
        "host_ms": statistics.median(host_ms),
        "runs": runs,
        "min": min(whole_ms),
        "max": max(whole_ms),
    }


@torch.no_grad()
def measure_shape(shape: str, made: Any, groups: Any, device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """Every launch of one shape, checked against the first."""
    from magi2_core.device import empty_cache
    from magi2_core.pipeline.accelerate import forward_of

    row: dict[str, Any] = {}
    first = None
    grid = (2, 3, 4) if device.type == "cpu" else GRIDS[shape]
    for launch in options["launches"]:
        torch.manual_seed(1)
        step = whole.step("272p" if shape == "share" else shape, made, text=TEXT[shape], grid=grid)
        step.velocity.forward = forward_of(made[0], launch, groups)
        for _ in range(3):
            found = velocities(step, 700)
        first = found if first is None else first
        error = ((found - first).norm() / first.norm()).item()
        assert error <= LIMIT, f"{shape} {launch}: velocities differ by {error:.2e} from those of {options['launches'][0]}"
        row[launch] = timed_launch(step, groups, device, options["runs"]) | {"difference": error}
        if launch == "graph":
            row[launch]["captured"] = step.velocity.forward.captured
        if groups.is_first:
            print(f"step {shape} {launch} on {groups.world.size} ranks: {json.dumps(row[launch])}", flush=True)
        del step
        empty_cache(device)
    return row


def rank_main(rank: int, world: int, init_method: str, arguments: list[str]) -> int:
    """One rank: every shape and launch."""
    from magi2_core.config import PreviewConfig
    from magi2_core.device import empty_cache, use_full_fp32
    from magi2_core.parallel.groups import Groups, plan_layout
    from magi2_kernels.common import choice
    from magi2_kernels.sink_attention import providers

    options = json.loads(arguments[0])
    on_cpu = options["device"] == "cpu"
    device = torch.device("cpu") if on_cpu else torch.device(options["device"], rank)
    config = whole.small_config() if on_cpu else PreviewConfig()
    use_full_fp32()
    if not on_cpu:
        torch.cuda.set_device(device)
        choice.choose("triton")
        providers.choose(providers.resolve("auto", providers.Target(device=device, dtype=torch.bfloat16, head_dim=128)).name)
    layout = plan_layout(world, config)
    groups = Groups.create(layout, rank=rank, device=device, init_method=init_method, timeout_seconds=120)
    torch.manual_seed(0)  # the ranks hold slices of the same weights and see the same request
    made = whole.model("272p", config=config, device=options["device"], most=LAYERS)
    share_of(made[0], groups)
    empty_cache(device)
    shapes = {shape: measure_shape(shape, made, groups, device, options) for shape in options["shapes"]}
    if rank == 0:
        report = {"layout": layout.name, "attention": providers.chosen(), "distinct MoE layers": made[1], "shapes": shapes}
        Path(options["out"]).write_text(json.dumps(report))
    groups.close()
    return 0


def main() -> int:
    """Writes the JSON."""
    parser = argparse.ArgumentParser(description="A step of the released size on several cards.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", action="append", choices=tuple(GRIDS), default=[])
    parser.add_argument("--launch", action="append", choices=("eager", "graph"), default=[])
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    from magi2_core.parallel.ranks import run_on_ranks

    # NVLink multicast can take a host's cards out of service where the driver's fabric is shared.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory(prefix="magi2-step-") as name:
        asked = {
            "out": f"{name}/found.json",
            "shapes": options.shape or ["272p", "share"],
            "launches": options.launch or ["eager", "graph"],
        }
        logs = run_on_ranks(
            Path(__file__), options.ranks, [json.dumps(asked | {"runs": options.runs, "device": options.device})], timeout_seconds=400
        )
        print(logs[0], flush=True)
        found = json.loads(Path(asked["out"]).read_text())
    if options.device == "cpu":
        machine = {"card": "cpu", "library": "gloo"}
    else:
        machine = measure.machine() | {"library": "NCCL " + ".".join(str(part) for part in torch.cuda.nccl.version())}
    options.out.write_text(json.dumps(machine | {"ranks": options.ranks} | found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
