"""The loop with a cheap velocity: cutting, resuming, interrupting, reporting."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from magi2_core.errors import CheckpointError, Interrupted
from magi2_core.request import Progress, SolverState, from_message, to_message
from magi2_core.sampling.denoise import DenoiseHooks, DenoiseOptions, denoise, start_state
from magi2_core.sampling.schedule import flow_schedule


@dataclass
class Pair:
    video_cond: torch.Tensor | None
    video_uncond: torch.Tensor
    audio_cond: torch.Tensor | None = None
    audio_uncond: torch.Tensor | None = None


class Wavy:
    """A velocity that depends on state, modality and timestep; keeps the timesteps it saw."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, video: torch.Tensor, audio: torch.Tensor | None, timestep: int) -> Pair:
        self.seen.append(timestep)
        first = Pair(torch.sin(2 * video) + timestep / 1000, torch.cos(video))
        return first if audio is None else Pair(first.video_cond, first.video_uncond, torch.sin(audio), 0.3 * audio + video.mean())


def start(steps: int, audio: bool = True) -> SolverState:
    generator = torch.Generator().manual_seed(5)
    video = torch.randn(1, 4, 3, 2, 2, generator=generator)
    return start_state(steps, 7.0, video, torch.randn(1, 6, 4, generator=generator) if audio else None)


OPTIONS = DenoiseOptions(video_guidance=5.0, audio_guidance=7.0)


def same(one: SolverState, other: SolverState) -> bool:
    assert one.step == other.step and one.sample.keys() == other.sample.keys()
    return all(torch.equal(one.sample[name], other.sample[name]) for name in one.sample)


@pytest.mark.parametrize("cut", range(1, 7))
def test_denoise_resumed_equals_uncut(cut: int) -> None:
    uncut = denoise(Wavy(), start(7), OPTIONS, DenoiseHooks())
    half = denoise(Wavy(), start(7), DenoiseOptions(video_guidance=5.0, audio_guidance=7.0, stop_after=cut), DenoiseHooks())
    assert half.step == cut
    sent = from_message(*to_message(half))
    assert same(denoise(Wavy(), sent, OPTIONS, DenoiseHooks()), uncut)


def test_denoise_resumed_twice_equals_uncut() -> None:
    state = start(5)
    for stop in range(1, 6):
        state = denoise(Wavy(), state, DenoiseOptions(video_guidance=5.0, audio_guidance=7.0, stop_after=stop), DenoiseHooks())
    assert same(state, denoise(Wavy(), start(5), OPTIONS, DenoiseHooks()))


def test_denoise_interrupt_delivers_a_state_that_goes_on() -> None:
    cuts: list[SolverState] = []
    polls = iter([False, False, False, True])
    with pytest.raises(Interrupted, match="3 of 6"):
        denoise(Wavy(), start(6), OPTIONS, DenoiseHooks(should_stop=lambda: next(polls), on_cut=cuts.append))
    assert [state.step for state in cuts] == [3]
    assert same(denoise(Wavy(), cuts[0], OPTIONS, DenoiseHooks()), denoise(Wavy(), start(6), OPTIONS, DenoiseHooks()))


def test_denoise_repeated_first_timestep_runs_every_step() -> None:
    model = Wavy()
    schedule = flow_schedule(200, 7.0)
    assert schedule.timesteps[0] == schedule.timesteps[1]
    final = denoise(model, start(200), OPTIONS, DenoiseHooks())
    assert tuple(model.seen) == schedule.timesteps and final.step == 200
    assert torch.isfinite(final.sample["video"]).all()


def test_denoise_without_audio() -> None:
    final = denoise(Wavy(), start(3, audio=False), DenoiseOptions(video_guidance=2.0, stage="refine"), DenoiseHooks())
    assert set(final.sample) == set(final.history) == {"video"}


def test_denoise_audio_solver_is_its_own() -> None:
    """Video guidance must not reach the audio except through the model: this model's audio sees the video's mean only."""

    class Apart(Wavy):
        def __call__(self, video: torch.Tensor, audio: torch.Tensor | None, timestep: int) -> Pair:
            assert audio is not None
            return Pair(torch.sin(video), torch.cos(video), torch.sin(audio), torch.cos(audio))

    finals = [
        denoise(Apart(), start(4), DenoiseOptions(video_guidance=scale, audio_guidance=7.0), DenoiseHooks()).sample for scale in (1.0, 9.0)
    ]
    assert torch.equal(finals[0]["audio"], finals[1]["audio"]) and not torch.equal(finals[0]["video"], finals[1]["video"])


def test_denoise_progress_and_previews() -> None:
    events: list[Progress] = []
    options = DenoiseOptions(video_guidance=5.0, audio_guidance=7.0, preview_every=2)
    keep: Callable[[Progress], None] = events.append
    final = denoise(Wavy(), start(5), options, DenoiseHooks(progress=keep))
    assert [event.step for event in events] == [1, 2, 3, 4, 5]
    assert [event.preview is not None for event in events] == [False, True, False, True, True]
    assert events[-1].eta_seconds == 0 and all(event.seconds_per_step > 0 for event in events)
    assert torch.equal(events[-1].preview, final.sample["video"])


@pytest.mark.parametrize("name", ["video", "audio"])
def test_denoise_stops_at_the_first_latents_that_are_not_numbers(name: str) -> None:
    class Broken(Wavy):
        def __call__(self, video: torch.Tensor, audio: torch.Tensor | None, timestep: int) -> Pair:
            pair = super().__call__(video, audio, timestep)
            if len(self.seen) == 3:
                getattr(pair, f"{name}_cond").view(-1)[5] = torch.nan
            return pair

    model = Broken()
    with pytest.raises(CheckpointError, match=f"after step 3 of 7 there are {name} latents that are not numbers"):
        denoise(model, start(7), OPTIONS, DenoiseHooks())
    assert len(model.seen) == 3
