"""The pipeline on an accelerator: the nano goldens in fp32, resuming bit for bit, and components that come and go."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from magi2_core import device as devices
from magi2_core.pipeline.build import Pipeline, build_pipeline
from magi2_core.request import DecodeRequest, EncodeRequest, Latents, RefineRequest, SampleRequest

GOLDEN = Path(__file__).resolve().parent / "nano_golden" / "t2v_red_circle_right" / "case.safetensors"
PROMPT = "a red circle moves to the right over a blue background, low hum"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(devices.resolve().type == "cpu", reason="no accelerator")]


@pytest.fixture(scope="module")
def pipeline(nano_folder: Path) -> Iterator[Pipeline]:
    made = build_pipeline(nano_folder, dtype="float32", kernels="reference")
    yield made
    made.close()


def request(pipeline: Pipeline, **changes) -> SampleRequest:
    base = SampleRequest(
        conditioning=pipeline.encode(EncodeRequest(prompt=PROMPT)),
        width=112,
        height=64,
        num_inference_steps=8,
        video_guidance=3.0,
        audio_guidance=3.0,
        deterministic=True,
    )
    return replace(base, **changes)


def rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def make(pipeline: Pipeline, **changes) -> Latents:
    golden = load_file(GOLDEN)
    noise = {"initial_video": golden["noise_video"], "initial_audio": golden["noise_audio"]}
    return pipeline.sample(request(pipeline, **noise, **changes))


def test_nano_golden_float32(pipeline: Pipeline) -> None:
    golden = load_file(GOLDEN)
    text = pipeline.encode(EncodeRequest(prompt=PROMPT)).text
    assert text.device.type == "cpu" and rel_l2(text.float(), golden["txt_feat"]) < 2e-2
    assert set(pipeline.placement().values()) == {"resident"}
    conditioning = replace(
        pipeline.encode(EncodeRequest(prompt=PROMPT)),
        text=golden["txt_feat"].bfloat16(),
        negative=golden["null_txt_feat"].bfloat16(),
    )
    latents = make(pipeline, conditioning=conditioning)
    print("latents", rel_l2(latents.video, golden["final_latent"]), rel_l2(latents.audio, golden["final_audio_latent"]))
    assert rel_l2(latents.video, golden["final_latent"]) < 2e-4
    assert rel_l2(latents.audio, golden["final_audio_latent"]) < 2e-4
    clip = pipeline.decode(DecodeRequest(latents=latents))
    for index, key in ((0, "frame_first"), (62, "frame_062"), (124, "frame_last")):
        assert (clip.frames[index].int() - golden[key].int()).abs().max() <= 2
    assert rel_l2(clip.waveform[0, :, 44100:52920].T, golden["audio_44100_from_sample_44100_to_52920"]) < 1e-3


def test_sample_resumed_equals_uncut(pipeline: Pipeline) -> None:
    uncut, cut = make(pipeline), make(pipeline, stop_after=3)
    assert make(pipeline).sha256() == uncut.sha256()
    assert make(pipeline, resume=cut).sha256() == uncut.sha256()


def test_sample_device_noise_is_seeded(pipeline: Pipeline) -> None:
    short = {"num_inference_steps": 1, "noise": "device"}
    first, second = (pipeline.sample(request(pipeline, **short)) for _ in range(2))
    assert first.sha256() == second.sha256() and first.noise == "device"
    assert pipeline.sample(request(pipeline, **short | {"noise": "cpu"})).sha256() != first.sha256()
    refined = [
        pipeline.refine(
            RefineRequest(conditioning=request(pipeline).conditioning, latents=first, width=240, height=128, deterministic=True)
        ).sha256()
        for _ in range(2)
    ]
    assert refined[0] == refined[1]


def test_placement_roundtrip_gives_the_same_clip_and_the_memory_back(pipeline: Pipeline, nano_folder: Path) -> None:
    names = ("preview", "refiner", "text_encoder", "vae", "turbo", "audio")
    moving = build_pipeline(nano_folder, dtype="float32", kernels="reference", placement=dict.fromkeys(names, "roundtrip"))
    uncut = make(pipeline)
    before = torch.cuda.memory_allocated()
    again = make(moving, conditioning=request(pipeline).conditioning)
    assert again.sha256() == uncut.sha256()
    clip = moving.decode(DecodeRequest(latents=again))
    assert torch.equal(clip.frames, pipeline.decode(DecodeRequest(latents=uncut)).frames)
    assert torch.cuda.memory_allocated() - before < 1 << 22


def test_placement_roundtrip_with_triton_kernels(nano_folder: Path) -> None:
    found = []
    for place in ("resident", "roundtrip"):
        pipeline = build_pipeline(nano_folder, dtype="bfloat16", kernels="triton", placement={"preview": place})
        found.append(pipeline.sample(request(pipeline, deterministic=True)).sha256())
    assert found[0] == found[1]


def test_bfloat16_end_to_end_with_a_picture(nano_folder: Path) -> None:
    rounded = build_pipeline(nano_folder, dtype="bfloat16", kernels="reference")
    image = torch.full((64, 112, 3), 128, dtype=torch.uint8)
    conditioning = rounded.encode(EncodeRequest(prompt=PROMPT, image=image))
    latents = rounded.sample(request(rounded, conditioning=conditioning))
    refined = rounded.refine(RefineRequest(conditioning=conditioning, latents=latents, width=240, height=128))
    clip = rounded.decode(DecodeRequest(latents=refined))
    assert clip.frames.shape == (249, 128, 240, 3) and clip.frames.float().std() > 5
    assert torch.isfinite(clip.waveform).all()
    quality = rounded.decode(DecodeRequest(latents=latents, decoder="wan", audio=False))
    assert quality.frames.shape == (125, 64, 112, 3)
