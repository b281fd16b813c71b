"""The velocity function of a request: branches, padding, references, what is refused."""

import pytest
import torch

from magi2_core.errors import RequestError
from magi2_core.model.preview import PreviewTransformer, WholeSequence
from magi2_core.model.velocity import PreviewVelocity


def test_preview_velocity_one_branch_equals_both(small_model: PreviewTransformer, small_request: dict, small_latents: tuple) -> None:
    video, audio = small_latents
    both = PreviewVelocity(small_model, **small_request)(video, audio, 600)
    cond = PreviewVelocity(small_model, **small_request, branches="cond")(video, audio, 600)
    uncond = PreviewVelocity(small_model, **small_request, branches="uncond")(video, audio, 600)
    assert (cond.video_uncond, cond.audio_uncond, uncond.video_cond, uncond.audio_cond) == (None,) * 4
    for got, want in (
        (cond.video_cond, both.video_cond),
        (cond.audio_cond, both.audio_cond),
        (uncond.video_uncond, both.video_uncond),
        (uncond.audio_uncond, both.audio_uncond),
    ):
        assert got.shape == want.shape and got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_preview_velocity_padding_does_not_show(small_model: PreviewTransformer, small_request: dict, small_latents: tuple) -> None:
    video, audio = small_latents
    plain = PreviewVelocity(small_model, **small_request)(video, audio, 600)
    small_model.split = WholeSequence()
    small_model.split.multiple = 48
    padded = PreviewVelocity(small_model, **small_request)
    assert padded.sequence.total % 48 == 0 and padded.sequence.runs[-1].kind == "padding"
    torch.testing.assert_close(padded(video, audio, 600).video_uncond, plain.video_uncond, rtol=1e-4, atol=1e-4)


def test_preview_velocity_zeroed_reference_changes_uncond_only(
    small_model: PreviewTransformer, small_request: dict, small_latents: tuple
) -> None:
    video, audio = small_latents
    kept = PreviewVelocity(small_model, **small_request)(video, audio, 600)
    zeroed = PreviewVelocity(small_model, **small_request, use_ref_for_uncond=False)(video, audio, 600)
    torch.testing.assert_close(kept.video_cond, zeroed.video_cond)
    assert float((kept.video_uncond - zeroed.video_uncond).abs().max()) > 1e-3


def test_preview_velocity_empty_negative_text(small_model: PreviewTransformer, small_request: dict, small_latents: tuple) -> None:
    video, audio = small_latents
    request = {**small_request, "negative": small_request["negative"][:, :0], "special": None, "ref_latents": None}
    result = PreviewVelocity(small_model, **request)(video, audio, 600)
    assert torch.isfinite(result.video_uncond).all() and not torch.equal(result.video_cond, result.video_uncond)


def test_preview_velocity_depends_on_time_and_latents(small_model: PreviewTransformer, small_request: dict, small_latents: tuple) -> None:
    video, audio = small_latents
    velocity = PreviewVelocity(small_model, **small_request)
    first = velocity(video, audio, 600)
    assert torch.equal(velocity(video, audio, 600).video_cond, first.video_cond)
    assert not torch.equal(velocity(video, audio, 599).video_cond, first.video_cond)
    assert not torch.equal(velocity(video, audio * 2, 600).video_cond, first.video_cond)


def test_preview_velocity_wrong_latents_are_refused(small_model: PreviewTransformer, small_request: dict, small_latents: tuple) -> None:
    video, audio = small_latents
    velocity = PreviewVelocity(small_model, **small_request)
    with pytest.raises(RequestError, match="was prepared for video"):
        velocity(video[:, :, :1], audio, 600)
    with pytest.raises(RequestError, match="and audio"):
        velocity(video, audio[:, :5], 600)
    with pytest.raises(RequestError, match="and audio"):
        velocity(video, torch.cat([audio, audio], dim=2), 600)
    wider = small_request | {"text": small_request["text"].repeat(1, 1, 2)}
    with pytest.raises(RequestError, match=r"text: \d+ channels, but this checkpoint's preview transformer takes"):
        PreviewVelocity(small_model, **wider)
    with pytest.raises(RequestError, match="both, cond, uncond"):
        PreviewVelocity(small_model, **small_request, branches="neither")
