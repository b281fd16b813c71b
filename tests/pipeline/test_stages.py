"""The stages on the embedded checkpoint with small clips: what crosses their borders, cutting, cancelling, refusing."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from magi2_core.errors import CheckpointError, Interrupted, OutOfMemoryError, RequestError
from magi2_core.pipeline.build import Pipeline, build_pipeline
from magi2_core.pipeline.hooks import StageHooks
from magi2_core.request import (
    Conditioning,
    DecodeRequest,
    EncodeRequest,
    Latents,
    Progress,
    RefineRequest,
    SampleRequest,
    load_latents,
    save_latents,
)
from magi2_core.sampling.noise import NoiseStream
from magi2_core.text.negative import DEFAULT_NEGATIVE_PROMPT


def small(conditioning: Conditioning, **changes) -> SampleRequest:
    base = SampleRequest(conditioning=conditioning, width=48, height=32, seconds=2.0, experimental_seconds=True, num_inference_steps=4)
    return replace(base, **changes)


@pytest.fixture(scope="module")
def finished(nano: Pipeline, conditioning: Conditioning) -> Latents:
    return nano.sample(small(conditioning))


def test_sample_records_how_it_was_made(nano: Pipeline, finished: Latents, conditioning: Conditioning) -> None:
    assert finished.video.shape == (1, 48, 7, 2, 3) and finished.audio.shape == (1, 50, 64)
    assert (finished.stage, finished.fps, finished.seed, finished.width, finished.height) == ("preview", 12.5, 42, 48, 32)
    assert finished.draws == ((1, 48, 7, 2, 3), (1, 50, 64)) and finished.noise == "cpu"
    assert finished.prompt_hash == conditioning.prompt_hash != "" and finished.checkpoint_hash == nano.checkpoint_hash != ""
    assert finished.settings["seconds"] == 2.0 and finished.settings["video_guidance"] == 5.0 and finished.settings["dtype"] == "float32"
    assert torch.isfinite(finished.video).all() and finished.solver is None


def test_sample_same_seed_same_bits(nano: Pipeline, finished: Latents, conditioning: Conditioning) -> None:
    assert nano.sample(small(conditioning)).sha256() == finished.sha256()
    assert nano.sample(small(conditioning, seed=43)).sha256() != finished.sha256()


def test_sample_injected_noise_equals_drawn(nano: Pipeline, finished: Latents, conditioning: Conditioning) -> None:
    stream = NoiseStream(42, "cpu", torch.device("cpu"))
    video, audio = (stream.draw(shape) for shape in finished.draws)
    given = nano.sample(small(conditioning, seed=7, initial_video=video, initial_audio=audio))
    assert torch.equal(given.video, finished.video) and torch.equal(given.audio, finished.audio)


@pytest.mark.parametrize("cut", [1, 3])
def test_sample_resumed_equals_uncut(nano: Pipeline, finished: Latents, conditioning: Conditioning, cut: int, tmp_path: Path) -> None:
    part = nano.sample(small(conditioning, stop_after=cut))
    assert part.solver is not None and part.solver.step == cut
    save_latents(part, tmp_path / "cut.safetensors")
    resumed = nano.sample(small(conditioning, resume=load_latents(tmp_path / "cut.safetensors")))
    assert resumed.sha256() == finished.sha256() and resumed.solver is None
    assert resumed.draws == finished.draws


def test_sample_interrupted_hands_over_a_state_that_goes_on(nano: Pipeline, finished: Latents, conditioning: Conditioning) -> None:
    kept: list[Latents] = []
    seen: list[Progress] = []
    hooks = StageHooks(
        progress=seen.append, should_stop=lambda: len([e for e in seen if e.stage == "preview"]) == 2, on_partial=kept.append
    )
    with pytest.raises(Interrupted, match="2 of 4"):
        nano.sample(small(conditioning), hooks)
    assert [latents.solver.step for latents in kept] == [2]
    assert nano.sample(small(conditioning, resume=kept[0])).sha256() == finished.sha256()


def test_sample_interrupted_before_the_first_step_keeps_nothing(nano: Pipeline, conditioning: Conditioning) -> None:
    kept: list[Latents] = []
    with pytest.raises(Interrupted):
        nano.sample(small(conditioning), StageHooks(should_stop=lambda: True, on_partial=kept.append))
    assert kept == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "seed was 42"),
        ({"shift": 5.0}, "shift"),
        ({"num_inference_steps": 5}, "steps was 4"),
        ({"width": 64}, "size was 48x32"),
        ({"seconds": 3.0}, "video latent"),
        ({"stop_after": 1}, "1 finished steps already"),
    ],
)
def test_sample_resume_refuses_another_trajectory(nano: Pipeline, conditioning: Conditioning, changes: dict, message: str) -> None:
    part = nano.sample(small(conditioning, stop_after=1))
    with pytest.raises(RequestError, match=message):
        nano.sample(small(conditioning, resume=part, **changes))
    with pytest.raises(RequestError, match="prompt hash"):
        nano.sample(small(replace(conditioning, prompt_hash="other"), resume=part))


def test_sample_resume_wants_the_same_preview_transformer_only(
    nano: Pipeline, finished: Latents, conditioning: Conditioning, nano_folder: Path, tmp_path: Path
) -> None:
    """Cut without a refiner and decoders, resumed with them; latents of early 0.1.0 name the whole installation."""
    bare = tmp_path / "bare"
    shutil.copytree(nano_folder, bare, ignore=shutil.ignore_patterns("refiner", "*vae", "stable-audio*"))
    part = build_pipeline(bare, device="cpu").sample(small(conditioning, stop_after=2))
    assert part.checkpoint_hash == nano.checkpoint_hash != nano.installation_hash
    for made_by in (part.checkpoint_hash, nano.installation_hash):
        assert nano.sample(small(conditioning, resume=replace(part, checkpoint_hash=made_by))).sha256() == finished.sha256()
    with pytest.raises(RequestError, match="checkpoint was 0000000000000000"):
        nano.sample(small(conditioning, resume=replace(part, checkpoint_hash="0" * 16)))


def test_sample_deterministic_is_restored_and_equal(nano: Pipeline, finished: Latents, conditioning: Conditioning) -> None:
    inside: list[bool] = []
    hooks = StageHooks(progress=lambda event: inside.append(torch.are_deterministic_algorithms_enabled()))
    made = nano.sample(small(conditioning, deterministic=True), hooks)
    assert inside and all(inside) and not torch.are_deterministic_algorithms_enabled()
    assert made.sha256() == finished.sha256() and made.settings["deterministic"] is True


def test_sample_picture_changes_the_clip(nano: Pipeline, finished: Latents) -> None:
    image = torch.zeros(45, 66, 3, dtype=torch.uint8)
    with_picture = nano.encode(EncodeRequest(prompt="a red circle moves to the right over a blue background, low hum", image=image))
    assert with_picture.special.shape == (1, 1, 128) and with_picture.special.any() and with_picture.prompt.endswith("low hum")
    made = nano.sample(small(with_picture))
    assert made.settings["has_image"] and made.video.shape == finished.video.shape and not torch.equal(made.video, finished.video)
    brighter = nano.sample(small(replace(with_picture, image=image + 200)))
    assert not torch.equal(brighter.video, made.video)


def test_encode_caches_texts(nano: Pipeline, conditioning: Conditioning) -> None:
    events: list[Progress] = []
    again = nano.encode(EncodeRequest(prompt=conditioning.prompt), StageHooks(progress=events.append))
    assert events == [] and torch.equal(again.text, conditioning.text) and again.prompt_hash == conditioning.prompt_hash
    other = nano.encode(EncodeRequest(prompt=conditioning.prompt, negative_prompt="hiss"), StageHooks(progress=events.append))
    assert len([event for event in events if event.stage == "encode"]) == 1
    assert other.prompt_hash != conditioning.prompt_hash and other.negative_prompt == "hiss"


def test_encode_negative_prompt_of_checkpoint_and_pack(nano: Pipeline, conditioning: Conditioning, monkeypatch: pytest.MonkeyPatch) -> None:
    assert conditioning.negative_prompt == nano.defaults.negative_prompt != ""
    monkeypatch.setattr(nano, "defaults", replace(nano.defaults, negative_prompt=""))
    assert nano.encode(EncodeRequest(prompt=conditioning.prompt)).negative_prompt == DEFAULT_NEGATIVE_PROMPT
    empty = nano.encode(EncodeRequest(prompt=conditioning.prompt, negative_prompt=""))
    assert empty.negative.shape == (1, 0, 128) and nano.sample(small(empty, num_inference_steps=1)).solver is None
    monkeypatch.setattr(nano, "defaults", replace(nano.defaults, use_negative_prompt=False))
    assert nano.encode(EncodeRequest(prompt=conditioning.prompt)).negative.shape[1] == 0


def test_encode_refuses_a_long_prompt_with_its_count(nano: Pipeline) -> None:
    with pytest.raises(RequestError, match=r"\d{4,} tokens.*7000"):
        nano.encode(EncodeRequest(prompt="circle " * 8000))
    with pytest.raises(RequestError, match=r"^negative prompt: .*\d{4,} tokens.*7000"):
        nano.encode(EncodeRequest(prompt="a circle", negative_prompt="circle " * 8000))


def test_refine_doubles_time_and_keeps_audio(nano: Pipeline, finished: Latents, conditioning: Conditioning) -> None:
    events: list[Progress] = []
    request = RefineRequest(conditioning=conditioning, latents=finished, width=80, height=64, num_inference_steps=2)
    refined = nano.refine(request, StageHooks(progress=events.append))
    assert refined.video.shape == (1, 48, 13, 4, 5) and torch.equal(refined.audio, finished.audio)
    assert (refined.stage, refined.fps, refined.width, refined.height) == ("refine", 25.0, 80, 64)
    assert refined.draws == (*finished.draws, (1, 48, 13, 4, 5))
    assert [event.step for event in events if event.stage == "refine"] == [1, 2]
    assert refined.settings["refine"]["noise_value"] == 220 and refined.settings["seconds"] == 2.0
    stream = NoiseStream(42, "cpu", torch.device("cpu"), finished.draws)
    injected = nano.refine(replace(request, initial_noise=stream.draw(refined.video.shape)))
    assert torch.equal(injected.video, refined.video)
    unguided = nano.refine(replace(request, video_guidance=0.0))
    assert torch.isfinite(unguided.video).all() and not torch.equal(unguided.video, refined.video)
    clip = nano.decode(DecodeRequest(latents=refined))
    assert clip.frames.shape == (49, 64, 80, 3) and clip.fps == 25.0 and clip.waveform.shape == (1, 2, 88200)


def test_refine_refuses_cut_latents(nano: Pipeline, conditioning: Conditioning) -> None:
    part = nano.sample(small(conditioning, stop_after=1))
    with pytest.raises(RequestError, match="cut"):
        nano.refine(RefineRequest(conditioning=conditioning, latents=part, width=80, height=64))


def test_decode_wan_and_parts(nano: Pipeline, finished: Latents) -> None:
    clip = nano.decode(DecodeRequest(latents=finished, decoder="wan", audio=False))
    assert clip.frames.shape == (25, 32, 48, 3) and clip.waveform is None
    sound = nano.decode(DecodeRequest(latents=finished, video=False))
    assert sound.frames is None and sound.waveform.shape == (1, 2, 88200)


def test_decode_exact_size_equals_resizing_the_whole_clip(nano: Pipeline, conditioning: Conditioning) -> None:
    from magi2_core.media.frames import resize_frames

    latents = nano.sample(small(conditioning, seconds=4.0, num_inference_steps=1))
    events: list[Progress] = []
    plain = nano.decode(DecodeRequest(latents=latents, audio=False), StageHooks(progress=events.append))
    windows = [event.step for event in events if event.stage == "decode"]
    assert windows == [1, 2] and events[-1].total == 2
    exact = nano.decode(DecodeRequest(latents=latents, audio=False, output_width=50, output_height=30))
    assert exact.frames.shape == (plain.frames.shape[0], 30, 50, 3)
    assert torch.equal(exact.frames, resize_frames(plain.frames, 50, 30))


def test_decode_larger_than_the_memory_is_refused_before(nano: Pipeline, finished: Latents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magi2_core.pipeline.guards.host_memory_left", lambda: 1 << 30)
    monkeypatch.setattr(nano, "use", lambda name: pytest.fail(f"{name} was loaded"))
    with pytest.raises(OutOfMemoryError, match=r"a clip of 25 frames of 8192x8192 needs .* Choose a smaller output size"):
        nano.decode(DecodeRequest(latents=finished, output_width=8192, output_height=8192))


def test_decode_cancelled_between_windows(nano: Pipeline, conditioning: Conditioning) -> None:
    latents = nano.sample(small(conditioning, seconds=4.0, num_inference_steps=1))
    events: list[Progress] = []
    with pytest.raises(Interrupted, match="1 of 2"):
        nano.decode(DecodeRequest(latents=latents), StageHooks(progress=events.append, should_stop=lambda: len(events) == 1))


def test_decode_cut_latents_shows_the_estimate(nano: Pipeline, conditioning: Conditioning) -> None:
    part = nano.sample(small(conditioning, stop_after=2))
    assert torch.equal(part.video, part.solver.history["video"][-1])
    assert nano.decode(DecodeRequest(latents=part, audio=False)).frames.shape[0] == 25


def test_require_names_the_absent_component_before_loading(nano_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    shutil.copytree(nano_folder, folder, ignore=shutil.ignore_patterns("refiner", "model-00002*", "stable-audio*"))
    events: list[Progress] = []
    pipeline = build_pipeline(folder, device="cpu", hooks=StageHooks(progress=events.append))
    with pytest.raises(CheckpointError, match=r"preview.*model-00002-of-00002.*audio"):
        pipeline.require(("encode", "preview", "decode"))
    with pytest.raises(CheckpointError, match="refiner"):
        pipeline.require(("refine",))
    pipeline.require(("encode", "decode"), audio=False)
    assert events == []


def test_require_finds_a_cut_file_before_loading(nano_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(nano_folder, folder)
    shard = folder / "preview" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"00002.*cut"):
        build_pipeline(folder, device="cpu").require(("encode", "preview"))


def test_build_pipeline_refuses(nano_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        build_pipeline(tmp_path / "nothing")
    for wrong in ({"dtype": "float16"}, {"dtype": torch.float16}, {"kernels": "fast"}, {"device": "tpu"}):
        with pytest.raises(RequestError):
            build_pipeline(nano_folder, **{"device": "cpu", **wrong})


def test_sample_bfloat16_is_close_at_first(nano_folder: Path, nano: Pipeline, conditioning: Conditioning) -> None:
    rounded = build_pipeline(nano_folder, device="cpu", dtype="bfloat16")
    request = small(conditioning, num_inference_steps=1, video_guidance=1.0, audio_guidance=1.0)
    ours, exact = rounded.sample(request), nano.sample(request)
    assert ours.settings["dtype"] == "bfloat16"
    error = (ours.video - exact.video).norm() / exact.video.norm()
    assert 0 < error < 0.2
    assert rounded.decode(DecodeRequest(latents=ours)).frames.shape[0] == 25


def test_latents_that_share_memory_are_saved_once(nano: Pipeline, conditioning: Conditioning, tmp_path: Path) -> None:
    part = nano.sample(small(conditioning, stop_after=2))
    base = torch.arange(part.audio.numel() + 64, dtype=torch.float32)
    view = base[64:].view(part.audio.shape)
    sharing = replace(
        part, audio=view, solver=replace(part.solver, previous=part.solver.previous | {"audio": base[:-64].view(part.audio.shape)})
    )
    save_latents(sharing, tmp_path / "shared.safetensors")
    read = load_latents(tmp_path / "shared.safetensors")
    assert torch.equal(read.audio, view) and torch.equal(read.solver.previous["audio"], base[:-64].view(part.audio.shape))
    assert torch.equal(read.video, part.video) and torch.equal(read.solver.history["video"][-1], part.video)
