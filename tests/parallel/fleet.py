"""What the tests of parallel/ share: random golden-format cases, recorded routing, and a run of a job on N gloo processes."""

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from magi2_core.checkpoint.tiny import TinySizes, preview_values
from magi2_core.checkpoint.tiny_values import random_state
from magi2_core.model.moe import Router
from magi2_core.model.preview import PreviewTransformer
from magi2_core.parallel.groups import Groups, ParallelConfig
from magi2_core.parallel.ranks import run_on_ranks

HERE = Path(__file__).resolve().parent
NARROW = TinySizes(num_layers=4, hidden_size=128, head_dim=32, moe_heads=2, expert_size=32, text_size=64)
"""The head counts of the golden model: 4 attention, 2 MoE."""
WIDE = TinySizes.parallel()
"""The head counts of the release: 24 attention, 12 MoE."""
STEPS = 3


def parity(name: str) -> Any:
    """A module of tests/parity."""
    full = "magi2_parity_run"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, HERE.parent / "parity" / "run.py")
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full] if name == "run" else sys.modules[full].load_sibling(name)


def write_case(folder: Path, sizes: TinySizes, *, seed: int = 3) -> Path:
    """A `preview_denoise` case with a picture and random weights; 30 + 10 video and audio tokens an item, 109 in all."""
    config = sizes.preview()
    folder.mkdir()
    with torch.device("meta"):
        shapes = dict(PreviewTransformer(config).state_dict(keep_vars=True))
    save_file(random_state(shapes, seed, "preview"), str(folder / "weights.safetensors"))
    (folder / "model.json").write_text(json.dumps(preview_values(config)))
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "latent": (1, 48, 2, 3, 5),
        "audio_latent": (1, 10, 64),
        "txt_feat": (1, 7, sizes.text_size),
        "null_txt_feat": (1, 4, sizes.text_size),
        "ref_image_special_token_embedding": (1, 1, sizes.text_size),
        "ref_image_feat": (1, 1, 48, 1, 2, 4),
    }
    save_file({name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}, str(folder / "inputs.safetensors"))
    values = {"model_config": "model.json", "case_params": {"steps": STEPS}, "shift": 7.0, "use_ref_for_uncond": True}
    values |= {"video_txt_guidance_scale": 5.0, "audio_txt_guidance_scale": 7.0}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "case.json").write_text(json.dumps({"kind": "preview_denoise", "compare": {}}))
    return folder


def denoise(folder: Path, groups: Groups) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Tensors of a case by the golden runner, and what every call of a router chose here: ids [G here, S of the expert group, K]."""
    kind, chosen = parity("kind_sampling"), []
    load = kind._load_model

    def loading(*arguments: Any) -> PreviewTransformer:
        model = load(*arguments)
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(lambda _module, _inputs, found: chosen.append(found.ids.clone()))
        return model

    kind._load_model = loading
    try:
        return kind.run_denoise(parity("case").Case(folder), groups), chosen
    finally:
        kind._load_model = load


def run_job(world: int, out: Path, layouts: list[ParallelConfig], cases: list[Path], **more: Any) -> dict[str, Any]:
    """Runs `on_ranks.py` on `world` processes; what rank 0 wrote down."""
    job = {"layouts": [asdict(layout) for layout in layouts], "cases": [str(case) for case in cases], "out": str(out), **more}
    path = out / "job.json"
    path.write_text(json.dumps(job))
    run_on_ranks(HERE / "on_ranks.py", world, [str(path)], timeout_seconds=240)
    return json.loads((out / "found.json").read_text())


def saved(out: Path, layout: ParallelConfig, case: Path) -> dict[str, Tensor]:
    """Rank 0's tensors of a case in a layout."""
    return load_file(out / f"{layout.name}-{case.name}.safetensors")


def saved_routes(out: Path, layout: ParallelConfig, case: Path) -> list[list[Tensor]]:
    """Every rank's routing, in order of the calls."""
    ranks = [load_file(out / f"{layout.name}-{case.name}-routes{rank}.safetensors") for rank in range(layout.world)]
    return [[kept[name] for name in sorted(kept)] for kept in ranks]


# A whole clip


def sample_request(pipeline: Any, values: dict[str, Any], **changes: Any) -> Any:
    """The small sampling request of a pipeline job, with a picture where the job says so."""
    from magi2_core.request import EncodeRequest, SampleRequest

    image = None
    if values.get("image"):
        image = (torch.arange(45 * 66 * 3) % 251).view(45, 66, 3).to(torch.uint8)
    conditioning = pipeline.encode(EncodeRequest(prompt="a red circle moves to the right, low hum", image=image))
    base = {"width": 48, "height": 32, "seconds": values.get("seconds", 2.0), "experimental_seconds": True, "num_inference_steps": STEPS}
    return SampleRequest(conditioning=conditioning, **(base | changes))


def whole_clip(pipeline: Any, values: dict[str, Any]) -> dict[str, Tensor]:
    """Every stage once; the refiner and the decoders start from given latents, so that each stage is compared alone."""
    from dataclasses import replace

    from magi2_core.request import DecodeRequest, RefineRequest

    request = sample_request(pipeline, values)
    made = pipeline.sample(request)
    draw = torch.Generator().manual_seed(1)
    given = replace(made, video=torch.randn(made.video.shape, generator=draw), audio=torch.randn(made.audio.shape, generator=draw))
    refined = pipeline.refine(RefineRequest(conditioning=request.conditioning, latents=given, width=80, height=64, num_inference_steps=2))
    found = {"text": request.conditioning.text, "video": made.video, "audio": made.audio, "refined": refined.video}
    if request.conditioning.special is not None:
        found["special"] = request.conditioning.special
    for decoder in ("turbo", "wan"):
        clip = pipeline.decode(DecodeRequest(latents=given, decoder=decoder))
        found[f"{decoder}.waveform"] = clip.waveform
        if pipeline.groups.is_first:
            found[f"{decoder}.frames"] = clip.frames
        else:
            assert clip.frames is None
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


def cancelled_at(pipeline: Any, values: dict[str, Any], *, wish: bool) -> str:
    """Message of a run whose first rank wishes to stop after two steps (the others never do); the pipeline works afterwards."""
    from magi2_core.errors import Interrupted
    from magi2_core.pipeline.hooks import StageHooks

    events: list[Any] = []
    hooks = StageHooks(progress=events.append, should_stop=lambda: wish and len(events) == 2)
    request = sample_request(pipeline, values)
    try:
        pipeline.sample(request, hooks)
    except Interrupted as error:
        return str(error)
    return "not cancelled"
