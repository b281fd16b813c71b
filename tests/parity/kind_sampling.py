"""Goldens of the sampler: schedule and solver traces, whole denoising runs, and the reference engine's own evaluation."""

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from magi2_core.checkpoint.index import torch_component
from magi2_core.checkpoint.load import load_module
from magi2_core.checkpoint.slices import expert_slices
from magi2_core.config import GenerationDefaults, PreviewConfig, RefinerSampling
from magi2_core.media.image import prepare_reference
from magi2_core.model.moe import Router
from magi2_core.model.preview import PreviewTransformer
from magi2_core.model.velocity import PreviewVelocity
from magi2_core.parallel.apply import apply_parallel
from magi2_core.parallel.collectives import gather_rows
from magi2_core.parallel.groups import Groups
from magi2_core.parallel.guidance import shared_velocity
from magi2_core.sampling.denoise import DenoiseHooks, DenoiseOptions, denoise, start_state
from magi2_core.sampling.guidance import guided_velocity, video_scale
from magi2_core.sampling.noise import NoiseStream
from magi2_core.sampling.schedule import flow_schedule
from magi2_core.sampling.unipc import FlowUniPC
from magi2_core.shapes import LatentShape, VideoShape
from magi2_kernels.moe_routing import router_logits

CPU = torch.device("cpu")
ALONE = Groups.local()


def run(case) -> dict[str, Tensor]:
    """Every tensor of the fp32 oracle."""
    return _RUNNERS[case.kind](case, torch.float32)


def run_bf16(case) -> dict[str, Tensor] | None:
    """Tensors of the bf16 oracle that its rules name; the schedule has none."""
    return None if case.kind == "schedule" else _RUNNERS[case.kind](case, torch.bfloat16)


def run_denoise(case, groups: Groups) -> dict[str, Tensor]:
    """A `preview_denoise` case in fp32 on the ranks of `groups`; every rank calls it and gets every tensor."""
    return _run_denoise(case, torch.float32, groups)


def _run_schedule(case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tags are a word and the number of steps, as "s8" and "refiner5"; a tag may have tables alone."""
    tags = {name.rsplit("_", 1)[0] for name in case.spec["compare"] if name.endswith(("_sigmas", "_timesteps"))}
    tags |= {name.removesuffix("_x0") for name in case.inputs if name.endswith("_x0")}
    produced = {}
    for tag in tags:
        start, outputs = case.inputs.get(f"{tag}_x0"), case.inputs.get(f"{tag}_model_outputs")
        steps = int(re.sub(r"\D", "", tag)) if outputs is None else outputs.shape[0]
        schedule = flow_schedule(steps, _shift_of(case, tag))
        produced[f"{tag}_sigmas"] = schedule.sigmas
        produced[f"{tag}_timesteps"] = torch.tensor(schedule.timesteps)
        if start is not None and outputs is not None:
            produced[f"{tag}_trajectory"] = _trajectory(schedule, start, lambda x, i, given=outputs: given[i])
        if start is not None:
            produced[f"{tag}_trajectory_statedep"] = _trajectory(
                schedule, start, lambda x, i: torch.tanh(1.3 * x) - 0.4 * x + 0.1 * (i % 3)
            )
    return produced


def _shift_of(case, tag: str) -> float:
    """What the case says, for its tag or for all; else the released one of the stage."""
    said = case.evaluation.get("shift", case.config.get("case_params", {}).get("shift"))
    found = said.get(tag) if isinstance(said, dict) else said
    return float(found) if found is not None else RefinerSampling().shift if tag.startswith("refiner") else GenerationDefaults().shift


def _trajectory(schedule, sample: Tensor, velocity) -> Tensor:
    solver = FlowUniPC(schedule)
    states = []
    for step in range(schedule.num_inference_steps):
        sample = solver.step(velocity(sample, step), sample)
        states.append(sample)
    return torch.stack(states)


class _Recorder:
    """A velocity model that keeps what the real one returned."""

    def __init__(self, model) -> None:
        self.model = model
        self.calls: list[tuple[Tensor, Tensor, int, Any]] = []

    def __call__(self, video: Tensor, audio: Tensor, timestep: int):
        velocities = self.model(video, audio, timestep)
        self.calls.append((video, audio, timestep, velocities))
        return velocities


def _load_model(case, dtype: torch.dtype, groups: Groups = ALONE) -> PreviewTransformer:
    config = PreviewConfig.from_dict(case.model_config)
    files = torch_component("preview", case.weights_path, case.weights)
    slices = expert_slices(config.moe, groups.expert.place, groups.expert.size)
    loaded = load_module(lambda: PreviewTransformer(config, dtype), files, device=CPU, dtype_of=lambda name: None, slices=slices)
    return apply_parallel(loaded.module, groups)


def _velocity_model(case, model: PreviewTransformer, video: Tensor, audio: Tensor, groups: Groups = ALONE):
    given = case.inputs
    velocity = PreviewVelocity(
        model,
        latent_shape=LatentShape(frames=video.shape[2], height=video.shape[3], width=video.shape[4], channels=video.shape[1]),
        audio_latents=audio.shape[1],
        text=given["txt_feat"],
        negative=given["null_txt_feat"],
        special=given.get("ref_image_special_token_embedding"),
        ref_latents=given.get("ref_image_feat"),
        use_ref_for_uncond=case.evaluation.get("use_ref_for_uncond", True),
        branches=groups.branch,
    )
    return shared_velocity(velocity, groups)


class _GapMeter:
    """Smallest distance, over tokens and heads, between the last chosen and the first rejected expert of every MoE layer."""

    def __init__(self, model: PreviewTransformer) -> None:
        self.gaps: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(self._measure)

    def _measure(self, router: Router, inputs: tuple[Tensor, Tensor], chosen: Any) -> None:
        logits = router_logits(*inputs)
        biased = logits.sigmoid() + router.expert_bias_ema.view(logits.shape[0], 1, -1)
        if router.top_k == biased.shape[-1]:
            self.gaps.append(torch.tensor(torch.inf))
            return
        best = biased.topk(router.top_k + 1, dim=-1).values
        gaps = best[..., -2] - best[..., -1]
        self.gaps.append(gaps.min() if gaps.numel() else torch.tensor(torch.inf))


def _options(case) -> DenoiseOptions:
    return DenoiseOptions(
        video_guidance=float(case.evaluation["video_txt_guidance_scale"]),
        audio_guidance=float(case.evaluation["audio_txt_guidance_scale"]),
        guidance=case.guidance,
    )


@torch.no_grad()
def _run_denoise(case, dtype: torch.dtype, groups: Groups = ALONE) -> dict[str, Tensor]:
    video, audio = case.inputs["latent"], case.inputs["audio_latent"]
    steps, shift = int(case.config["case_params"]["steps"]), float(case.evaluation["shift"])
    model, options, schedule = _load_model(case, dtype, groups), _options(case), flow_schedule(steps, shift)
    meter, recorder = _GapMeter(model), _Recorder(_velocity_model(case, model, video, audio, groups))
    produced = {"timesteps": torch.tensor(schedule.timesteps), "sigmas": schedule.sigmas}
    state = start_state(steps, shift, video, audio)
    for step in range(steps):
        state = denoise(recorder, state, replace(options, stop_after=step + 1), DenoiseHooks())
        before_video, before_audio, timestep, found = recorder.calls[-1]
        tag = f"step_{step:02d}"
        scale = video_scale(options.video_guidance, video.shape[2], timestep, options.guidance)
        produced |= {
            f"{tag}_pred_video": torch.cat([found.video_cond, found.video_uncond]),
            f"{tag}_pred_audio": torch.cat([found.audio_cond, found.audio_uncond]),
            f"{tag}_cfg_video": guided_velocity(before_video, found.video_cond, found.video_uncond, scale, options.guidance),
            f"{tag}_cfg_audio": guided_velocity(
                before_audio, found.audio_cond, found.audio_uncond, torch.tensor([options.audio_guidance]), options.guidance
            ),
            f"{tag}_latent": state.sample["video"],
            f"{tag}_audio_latent": state.sample["audio"],
        }
    produced |= {"final_latent": state.sample["video"], "final_audio_latent": state.sample["audio"]}
    if meter.gaps:
        gaps = gather_rows(torch.stack(meter.gaps)[None], groups.world, [1] * groups.world.size)
        produced["router_min_gap_per_step_and_moe_layer"] = gaps.amin(dim=0).view(steps, -1)
    return produced


@torch.no_grad()
def _run_engine(case, dtype: torch.dtype) -> dict[str, Tensor]:
    params = case.config["case_params"]
    shape = VideoShape(width=params["w"], height=params["h"], seconds=params["seconds"])
    stream = NoiseStream(params["seed"], "cpu", CPU)
    model = _load_model(case, dtype)
    video = stream.draw((1, model.config.video_in_channels, *shape.latent().size[2:]))
    audio = stream.draw((1, shape.audio_latents(), model.config.audio_in_channels))
    steps, shift = int(params["steps"]), float(case.evaluation["shift"])
    final = denoise(_velocity_model(case, model, video, audio), start_state(steps, shift, video, audio), _options(case), DenoiseHooks())
    produced = {
        "init_latent": video,
        "init_audio_latent": audio,
        "timesteps": torch.tensor(flow_schedule(steps, shift).timesteps),
        "final_latent": final.sample["video"],
        "final_audio_latent": final.sample["audio"],
    }
    if "image_uint8" in case.inputs:
        kind = case.evaluation.get("ref_image_type", "original")
        produced["vae_input"] = prepare_reference(case.inputs["image_uint8"], params["w"], params["h"], kind)
    return produced


_RUNNERS = {"schedule": _run_schedule, "preview_denoise": _run_denoise, "preview_engine": _run_engine}
