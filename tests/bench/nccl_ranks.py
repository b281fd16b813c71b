"""Ranks on real cards: `python tests/bench/nccl_ranks.py --out FILE [--device cuda] [--ranks 1,2]`.

A make-tiny checkpoint with the head counts of the release goes through preview, refiner and decoder: without a process group, then on
one rank whose exchanges run through the collective library onto itself, then on as many ranks as there are cards (two at most, unless
--ranks says so). In fp32 with plain kernels the ranks must agree with one rank to 2e-5; in bf16 with Triton the difference is written
down beside that of the plain kernels. One exchange of released size is timed. With --device cpu the same runs on gloo.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if "magi2_core" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("magi2_packages", ROOT / "magi2_core" / "packages.py")
    _packages = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_packages)
    _packages.register()

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402

STEPS, LIMIT = 4, 2e-5
EXCHANGE_TOKENS, EXCHANGE_HEADS, EXCHANGE_WIDTH = 117504, 24, 128
"""One packed step at 540p."""


def modes(device: str) -> dict[str, tuple[str, str]]:
    """Name -> dtype and kernels."""
    exact = {"fp32": ("float32", "reference")}
    return exact if device == "cpu" else exact | {"bf16": ("bfloat16", "triton"), "bf16_plain": ("bfloat16", "reference")}


def clip(pipeline: Any) -> dict[str, Tensor]:
    """Latents of both stages and the frames, from random features (the text encoder has nothing to do with ranks)."""
    from dataclasses import replace

    from magi2_core.request import Conditioning, DecodeRequest, RefineRequest, SampleRequest

    draw = torch.Generator().manual_seed(5)
    text, negative = (torch.randn(1, rows, 64, generator=draw).to(torch.bfloat16) for rows in (37, 11))
    conditioning = Conditioning(text=text, negative=negative, prompt="random", prompt_hash="random")
    width, height = (48, 32) if pipeline.device.type == "cpu" else (176, 112)
    request = SampleRequest(
        conditioning=conditioning, width=width, height=height, seconds=4.0, experimental_seconds=True, num_inference_steps=STEPS
    )
    begun = time.perf_counter()
    made = pipeline.sample(request)
    seconds = time.perf_counter() - begun
    given = replace(made, video=torch.randn(made.video.shape, generator=draw))
    refined = pipeline.refine(
        RefineRequest(conditioning=conditioning, latents=given, width=2 * width, height=2 * height, num_inference_steps=2)
    )
    frames = pipeline.decode(DecodeRequest(latents=given, audio=False)).frames
    found = {"video": made.video, "audio": made.audio, "refined": refined.video, "seconds": torch.tensor(seconds)}
    return found | ({} if frames is None else {"frames": frames})


def exchange(groups: Any, device: torch.device) -> dict[str, float]:
    """Milliseconds and GB/s a rank sends of the q, k, v exchange at 540p and of its way back."""
    from magi2_core.device import synchronize
    from magi2_core.parallel.context import heads_to_tokens, tokens_to_heads
    from magi2_core.parallel.groups import split_evenly

    total = EXCHANGE_TOKENS if device.type != "cpu" else EXCHANGE_TOKENS // 64
    counts = split_evenly(total, groups.context.size)
    shape = (counts[groups.context.place], EXCHANGE_HEADS, EXCHANGE_WIDTH)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    times = []
    for _ in range(13):
        synchronize(device)
        before, begun = groups.traffic.sent_bytes, time.perf_counter()
        heads = tokens_to_heads((q, k, v), groups.context, counts)
        heads_to_tokens(heads[0], groups.context, counts)
        synchronize(device)
        times.append(time.perf_counter() - begun)
    middle = sorted(times[3:])[5]
    return {"ms": middle * 1e3, "sent_gb_s": (groups.traffic.sent_bytes - before) / middle / 1e9}


def rank_main(rank: int, world: int, init_method: str, arguments: list[str]) -> int:
    """One rank: every mode, then the exchange."""
    from magi2_core.checkpoint.components import preview_config, refiner_config
    from magi2_core.parallel.groups import Groups, plan_layout
    from magi2_core.pipeline.build import build_pipeline

    folder, out, kind = Path(arguments[0]), Path(arguments[1]), arguments[2]
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    layout = plan_layout(world, preview_config(folder), refiner=refiner_config(folder))
    groups = Groups.create(layout, rank=rank, device=device, init_method=init_method, timeout_seconds=120)
    for mode, (dtype, kernels) in modes(kind).items():
        pipeline = build_pipeline(folder, device=str(device), dtype=dtype, kernels=kernels, groups=groups)
        clip(pipeline)  # the first run builds kernels and connections
        made = clip(pipeline)
        if rank == 0:
            save_file({name: tensor.contiguous().clone() for name, tensor in made.items()}, str(out / f"{world}-{mode}.safetensors"))
        pipeline.close()
    times = exchange(groups, device)
    if rank == 0:
        traffic = {"calls": groups.traffic.calls, "sent_bytes": groups.traffic.sent_bytes}
        (out / f"{world}.json").write_text(json.dumps({"layout": layout.name, "reason": layout.reason, "exchange": times, **traffic}))
    groups.close()
    return 0


def relative(found: Tensor, wanted: Tensor) -> float:
    """Relative L2 difference."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)).item()


def compare(out: Path, plain: dict[str, dict[str, Tensor]], worlds: list[int]) -> tuple[dict[str, Any], list[str]]:
    """Differences of every world to the run without a process group, and what is over its limit."""
    found: dict[str, Any] = {}
    misses = []
    for world in worlds:
        entry = json.loads((out / f"{world}.json").read_text())
        for mode, wanted in plain.items():
            made = load_file(out / f"{world}-{mode}.safetensors")
            row: dict[str, Any] = {"seconds": made.pop("seconds").item(), "seconds_alone": wanted["seconds"].item()}
            for name, tensor in made.items():
                row[name] = {"relative": relative(tensor, wanted[name]), "bits_equal": torch.equal(tensor, wanted[name])}
                limit = 0.0 if name == "frames" else LIMIT
                if mode == "fp32" and row[name]["relative"] > limit:
                    misses.append(f"{world} ranks, {mode}, {name}: {row[name]['relative']:.2e}, limit {limit:.0e}")
            entry[mode] = row
        found[str(world)] = entry
    if "bf16_plain" in plain:
        found["triton_to_plain"] = {
            name: relative(plain["bf16"][name], plain["bf16_plain"][name]) for name in ("video", "audio", "refined")
        }
    return found, misses


def main(argv: list[str] | None = None) -> int:
    """Writes the JSON; 1 when the fp32 runs disagree."""
    parser = argparse.ArgumentParser(description="A clip on NCCL ranks compared with one process.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", default="", help="world sizes, as 1,2 (default: 1, and 2 where two cards are visible)")
    options = parser.parse_args(argv)
    from magi2_core.checkpoint.tiny import TinySizes, make_tiny
    from magi2_core.parallel.ranks import run_on_ranks
    from magi2_core.pipeline.build import build_pipeline

    # NVLink multicast can take a host's cards out of service where the driver's fabric is shared.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    cards = 2 if options.device == "cpu" else torch.cuda.device_count()
    worlds = [int(part) for part in options.ranks.split(",")] if options.ranks else [1, 2][: max(1, cards)]
    with tempfile.TemporaryDirectory(prefix="magi2-nccl-") as name:
        work = Path(name)
        folder = make_tiny(work / "tiny", sizes=TinySizes.parallel())
        plain = {}
        for mode, (dtype, kernels) in modes(options.device).items():
            pipeline = build_pipeline(
                folder, device=options.device if options.device == "cpu" else f"{options.device}:0", dtype=dtype, kernels=kernels
            )
            clip(pipeline)
            plain[mode] = clip(pipeline)
            pipeline.close()
        for world in worlds:
            run_on_ranks(Path(__file__), world, [str(folder), str(work), options.device], timeout_seconds=400)
        found, misses = compare(work, plain, worlds)
    card = "cpu" if options.device == "cpu" else torch.cuda.get_device_name()
    library = "gloo" if options.device == "cpu" else ".".join(str(part) for part in torch.cuda.nccl.version())
    report = {"card": card, "cards": cards, "torch": torch.__version__, "library": library, "misses": misses, "worlds": found}
    options.out.write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))
    return int(bool(misses))


if __name__ == "__main__":
    sys.exit(main())
