"""The embedded checkpoint end to end, text to frames and sound, against goldens made with the released sampler and components.

Tolerances of the goldens' own README: latents rel L2 2e-4, frames 2 levels, audio rel L2 1e-3; text features and picture are exact.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from magi2_core.media.image import load_image
from magi2_core.pipeline.build import Pipeline
from magi2_core.request import DecodeRequest, EncodeRequest, SampleRequest

GOLDEN = Path(__file__).resolve().parent / "nano_golden"
CASES = json.loads((GOLDEN / "cases.json").read_text())


def rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("name", sorted(CASES["cases"]))
def test_nano_golden(nano: Pipeline, name: str) -> None:
    case, golden = CASES["cases"][name], load_file(GOLDEN / name / "case.safetensors")
    picture = GOLDEN / name / "image.png"
    image = load_image(picture) if picture.is_file() else None
    assert (image is not None) == ("ref_image_latent" in golden)

    conditioning = nano.encode(EncodeRequest(prompt=case["prompt"], image=image))
    assert conditioning.negative_prompt == CASES["negative_prompt"]
    assert torch.equal(conditioning.text.float(), golden["txt_feat"])
    assert torch.equal(conditioning.negative.float(), golden["null_txt_feat"])
    if image is not None:
        assert torch.equal(conditioning.special[0].float(), golden["special_token"])

    latents = nano.sample(
        SampleRequest(
            conditioning=conditioning,
            width=112,
            height=64,
            seed=case["seed"],
            num_inference_steps=case["steps"],
            video_guidance=case["video_guidance"],
            audio_guidance=case["audio_guidance"],
            shift=case["shift"],
            initial_video=golden["noise_video"],
            initial_audio=golden["noise_audio"],
        )
    )
    assert latents.solver is None
    assert rel_l2(latents.video, golden["final_latent"]) < 2e-4
    assert rel_l2(latents.audio, golden["final_audio_latent"]) < 2e-4

    clip = nano.decode(DecodeRequest(latents=latents))
    assert clip.frames.shape == (125, 64, 112, 3) and clip.frames.dtype == torch.uint8 and clip.fps == 12.5
    for index, key in ((0, "frame_first"), (62, "frame_062"), (124, "frame_last")):
        assert (clip.frames[index].int() - golden[key].int()).abs().max() <= 2
    assert clip.waveform.shape == (1, 2, 441000) and clip.sample_rate == 44100
    assert rel_l2(clip.waveform[0, :, 44100:52920].T, golden["audio_44100_from_sample_44100_to_52920"]) < 1e-3
