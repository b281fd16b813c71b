"""The denoising loop of both stages: ask the model, guide, step, report; stop only between two steps.

Facts: spec preview.md 5, components.md 1.9. One model call a step gives both guidance branches of both modalities; video and
audio have a solver each. The refiner has no audio. A run is a function of `SolverState`, so a cut run goes on bit for bit.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from magi2_core.device import synchronize
from magi2_core.errors import Interrupted
from magi2_core.request import GuidanceOptions, Progress, SolverState

from .finite import check_finite
from .guidance import guided_velocity, video_scale
from .schedule import flow_schedule
from .unipc import FlowUniPC

PLAIN = GuidanceOptions()


class VelocityModel(Protocol):
    """Velocity at a state: video fp32 [1, 48, T, h, w], audio fp32 [1, A, 64] or None, integer timestep 0..999.

    The result has `video_cond`, `video_uncond`, `audio_cond`, `audio_uncond`: fp32, None for what was not computed.
    """

    def __call__(self, video: Tensor, audio: Any, timestep: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class DenoiseOptions:
    """Guidance of a run, how often it shows its x0 estimate (0: never) and after how many finished steps it is cut."""

    video_guidance: float
    audio_guidance: float = 0.0
    guidance: GuidanceOptions = PLAIN
    stage: str = "preview"
    preview_every: int = 0
    stop_after: int | None = None


@dataclass(frozen=True, kw_only=True)
class DenoiseHooks:
    """Called between two steps: `on_cut` gets the state of a run that `should_stop` ended."""

    progress: Callable[[Progress], None] = lambda event: None
    should_stop: Callable[[], bool] = lambda: False
    on_cut: Callable[[SolverState], None] = lambda state: None


def start_state(steps: int, shift: float, video: Tensor, audio: Tensor | None) -> SolverState:
    """State of a run that has not begun: the noise is the sample."""
    sample = {"video": video} if audio is None else {"video": video, "audio": audio}
    return SolverState(step=0, num_inference_steps=steps, shift=shift, sample=sample, history={}, previous={}, order=0)


def denoise(model: VelocityModel, state: SolverState, options: DenoiseOptions, hooks: DenoiseHooks) -> SolverState:
    """Runs from `state` to the last step, or to `options.stop_after`, and returns the state there (tensors on the model's device).

    Raises Interrupted when `hooks.should_stop` says so at a step boundary, after `hooks.on_cut`; CheckpointError when latents stop being numbers.
    """
    schedule = flow_schedule(state.num_inference_steps, state.shift)
    total = schedule.num_inference_steps
    last = max(state.step, min(total, options.stop_after or total))
    sample = dict(state.sample)
    solvers = {name: FlowUniPC.resumed(schedule, state, name) for name in sample}
    marks: list[float] = []
    for step in range(state.step, last):
        if hooks.should_stop():
            hooks.on_cut(_state(state, step, sample, solvers))
            raise Interrupted(f"{options.stage}: cancelled after {step} of {total} steps.")
        marks = marks or [time.perf_counter()]
        timestep = schedule.timesteps[step]
        velocities = model(sample["video"], sample.get("audio"), timestep)
        scale = video_scale(options.video_guidance, sample["video"].shape[2], timestep, options.guidance)
        guided = {"video": guided_velocity(sample["video"], velocities.video_cond, velocities.video_uncond, scale, options.guidance)}
        if "audio" in sample:
            scale = torch.tensor([options.audio_guidance], dtype=torch.float32)
            guided["audio"] = guided_velocity(sample["audio"], velocities.audio_cond, velocities.audio_uncond, scale, options.guidance)
        sample = {name: solvers[name].step(guided[name], sample[name]) for name in sample}
        synchronize(sample["video"].device)
        check_finite(sample, f"{options.stage}: after step {step + 1} of {total}")
        marks.append(time.perf_counter())
        hooks.progress(_progress(step + 1, total, options, marks, solvers["video"].history[-1]))
    return _state(state, last, sample, solvers)


def _state(start: SolverState, step: int, sample: dict[str, Tensor], solvers: dict[str, FlowUniPC]) -> SolverState:
    return replace(
        start,
        step=step,
        sample=sample,
        history={name: solver.history for name, solver in solvers.items() if solver.history},
        previous={name: solver.previous for name, solver in solvers.items() if solver.previous is not None},
        order=solvers["video"].order,
    )


def _progress(step: int, total: int, options: DenoiseOptions, marks: list[float], x0: Tensor) -> Progress:
    """Event after `step` finished steps. The first step of a run warms caches up, so it counts only while it is the only one."""
    seconds = (marks[-1] - marks[1]) / (len(marks) - 2) if len(marks) > 2 else marks[1] - marks[0]
    shown = options.preview_every > 0 and (step % options.preview_every == 0 or step == total)
    return Progress(
        stage=options.stage,
        step=step,
        total=total,
        seconds_per_step=seconds,
        eta_seconds=seconds * (total - step),
        preview=x0.detach().to("cpu", torch.float32) if shown else None,
    )
