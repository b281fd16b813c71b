"""Bad input to the command line: what it says, the exit code, that no weights were read and that nothing was left under a final name."""

import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from magi2_core import cli, shapes
from magi2_core.checkpoint.catalog import EMBEDDED
from magi2_core.checkpoint.manifest import checkpoint_hash
from magi2_core.commands import fleet
from magi2_core.errors import Interrupted
from magi2_core.media import mux
from magi2_core.request import Latents, SolverState, save_latents

PROMPT = ["--prompt", "a red circle moves to the right over a blue background, low hum"]

TABLE = [
    ("no_prompt", [], 2, "no prompt was given"),
    ("empty_prompt", ["--prompt", "  "], 2, "prompt is empty"),
    ("two_prompts", [*PROMPT, "--prompt-file", "{text}"], 2, "give one of"),
    ("prompt_file_absent", ["--prompt-file", "{absent}"], 2, "cannot be read"),
    ("prompt_file_empty", ["--prompt-file", "{empty}"], 2, "prompt is empty"),
    ("caption_not_json", ["--caption", "{text}"], 2, "is not valid JSON"),
    ("caption_not_object", ["--caption", "{array}"], 2, "holds a JSON list, expected an object"),
    (
        "size_not_a_multiple",
        [*PROMPT, "--size", "900x500"],
        2,
        "900x500: both sides must be positive multiples of 16. Nearest: 896x496 or 912x512",
    ),
    ("size_zero", [*PROMPT, "--size", "0x0"], 2, "Nearest: 16x16"),
    ("size_words", [*PROMPT, "--size", "large"], 2, "'large' is unknown. Use one of 272p, 540p, 1080p or a size as WIDTHxHEIGHT"),
    ("caption_nested_deep", ["--caption", "{deep}"], 2, "is not valid JSON"),
    ("config_nested_deep", [*PROMPT, "--checkpoint", "{deep_config}"], 3, "generation.json: is not valid JSON"),
    ("size_malformed", [*PROMPT, "--size", "896x"], 2, "not understood"),
    ("refine_size", [*PROMPT, "--refine-size", "1920x1080"], 2, "Nearest: 1920x1072 or 1920x1088"),
    ("output_size_odd", [*PROMPT, "--output-size", "113x64"], 2, "both sides must be even"),
    ("output_size_enormous", [*PROMPT, "--output-size", "100000x100000"], 2, "both sides must be even, from 2 to 16384"),
    ("seconds", [*PROMPT, "--seconds", "5"], 2, "the model makes 10 s clips"),
    ("seconds_experimental", [*PROMPT, "--seconds", "11", "--experimental-seconds"], 2, "2 to 10 are allowed"),
    ("steps_zero", [*PROMPT, "--steps", "0"], 2, "steps 0: must be a whole number from 1 to 1000"),
    ("steps_words", [*PROMPT, "--steps", "many"], 2, "argument --steps: invalid int value: 'many'"),
    ("stop_after_end", [*PROMPT, "--steps", "4", "--stop-after", "5"], 2, "stop_after 5: must be from 1 to the 4 steps"),
    ("video_guidance_nan", [*PROMPT, "--video-guidance", "nan"], 2, "video guidance nan: must be a number from 0 to 100"),
    ("audio_guidance_infinite", [*PROMPT, "--audio-guidance", "inf"], 2, "audio guidance inf: must be a number"),
    ("shift_zero", [*PROMPT, "--shift", "0"], 2, "shift 0.0: must be a number from 0.01"),
    ("seed_negative", [*PROMPT, "--seed", "-1"], 2, "seed -1: must be a whole number from 0 to 18446744073709551615"),
    ("seed_too_large", [*PROMPT, "--seed", "18446744073709551616"], 2, "must be a whole number from 0"),
    ("image_absent", [*PROMPT, "--image", "{absent}"], 2, "no such file"),
    ("image_unreadable", [*PROMPT, "--image", "{text}"], 2, "cannot be read as a picture"),
    ("image_cut", [*PROMPT, "--image", "{cut_image}"], 2, "cannot be read as a picture"),
    ("image_one_pixel", [*PROMPT, "--image", "{pixel}"], 2, "1x1 pixels, at least 2x2 are needed"),
    ("image_too_narrow", [*PROMPT, "--image", "{sliver}"], 2, "Crop the picture or use a larger video size"),
    ("latents_not_latents", ["--from-latents", "{text}"], 2, "cannot be read"),
    ("latents_absent", ["--from-latents", "{absent}"], 2, "cannot be read"),
    ("resume_finished", ["--resume", "{latents}"], 2, "sampling is finished. Decode it: --from-latents"),
    ("latents_with_size", ["--from-latents", "{latents}", "--size", "272p"], 2, "--size does not go with saved latents"),
    ("latents_with_seed", ["--from-latents", "{latents}", "--seed", "7"], 2, "--seed does not go with saved latents"),
    ("latents_with_prompt", ["--from-latents", "{latents}", *PROMPT], 2, "--prompt has no effect on saved latents"),
    ("latents_with_image", ["--from-latents", "{latents}", "--image", "{pixel}"], 2, "--image has no effect on saved latents"),
    ("refiner_steps_alone", [*PROMPT, "--refiner-steps", "3"], 2, "--refiner-steps has no effect without the refiner"),
    ("image_name_too_long", [*PROMPT, "--image", "i" * 300], 2, "no such file"),
    ("checkpoint_name_too_long", [*PROMPT, "--checkpoint", "c" * 300], 3, "was not found"),
    ("checkpoint_of_no_user", [*PROMPT, "--checkpoint", "~no-such-user/x"], 3, "was not found"),
    ("output_name_too_long", [*PROMPT, "--output", "o" * 300 + ".mp4"], 5, "File name too long"),
    ("latents_name_too_long", [*PROMPT, "--output", "o" * 245 + ".mp4"], 5, "File name too long"),
    ("latents_with_resume", ["--from-latents", "{latents}", "--resume", "{latents}"], 2, "give one"),
    ("enhance_without_service", [*PROMPT, "--enhance"], 2, "--enhance needs --enhance-url and --enhance-model"),
    ("device_absent", [*PROMPT, "--device", "cuda:99"], 2, "is not there"),
    ("device_words", [*PROMPT, "--device", "fast"], 2, "is not understood"),
    ("option_unknown", [*PROMPT, "--colour", "red"], 2, "unrecognized arguments: --colour red"),
    ("output_not_mp4", [*PROMPT, "--output", "{folder}/clip.avi"], 2, "must end in .mp4"),
    ("wav_not_wav", [*PROMPT, "--wav", "{folder}/sound.mp3"], 2, "must end in .wav"),
    ("output_is_a_folder", [*PROMPT, "--output", "{mp4_folder}"], 5, "is a folder. Name a file in it"),
    ("output_below_a_file", [*PROMPT, "--output", "{text}/clip.mp4"], 5, "is a file, or lies below one"),
    ("checkpoint_absent", [*PROMPT, "--checkpoint", "nowhere"], 3, "checkpoint 'nowhere' was not found (found: nano)"),
    ("component_absent", [*PROMPT, "--checkpoint", "{no_turbo}"], 3, "turbo (decodes the video): no turbo_vae/"),
    ("shard_absent", [*PROMPT, "--checkpoint", "{no_shard}"], 3, "preview (makes the clip): no preview/model-00002-of-00002.safetensors"),
    (
        "refiner_absent",
        [*PROMPT, "--checkpoint", "{no_refiner}", "--refine-size", "224x128"],
        3,
        "refiner (1080p): no refiner/model.safetensors",
    ),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, nano_folder: Path) -> dict[str, str]:
    """The files and folders that the table names."""
    base = tmp_path_factory.mktemp("bad_input")
    files = {
        name: base / file for name, file in (("text", "text.txt"), ("empty", "empty.txt"), ("array", "array.json"), ("pixel", "p.png"))
    }
    files["text"].write_text("just words")
    files["empty"].write_text("\n")
    files["array"].write_text("[1, 2]")
    Image.new("RGB", (1, 1)).save(files["pixel"])
    files["sliver"] = base / "sliver.png"
    Image.new("RGB", (400, 4)).save(files["sliver"])
    files["cut_image"] = base / "cut.png"
    files["cut_image"].write_bytes((nano_folder.parent / "green_square.png").read_bytes()[:100])
    files["latents"] = base / "latents.safetensors"
    save_latents(small_latents(), files["latents"])
    files["deep"] = base / "deep.json"
    files["deep"].write_text('{"a":' * 20_000 + "1" + "}" * 20_000)
    files["deep_config"] = copy_without(nano_folder, base / "deep_config", "generation.json", None)
    (files["deep_config"] / "generation.json").write_bytes(files["deep"].read_bytes())
    files["mp4_folder"] = base / "folder.mp4"
    files["mp4_folder"].mkdir()
    for name, part, left_out in (
        ("no_turbo", "turbo_vae", None),
        ("no_shard", "preview", "model-00002-of-00002.safetensors"),
        ("no_refiner", "refiner", None),
    ):
        files[name] = copy_without(nano_folder, base / name, part, left_out)
    return {name: str(path) for name, path in files.items()} | {"absent": str(base / "absent"), "folder": str(base)}


def small_latents() -> Latents:
    """Seeded noise in the shape of a 32x32 clip: enough to decode."""
    latent = shapes.VideoShape(width=32, height=32).latent()
    draw = torch.Generator().manual_seed(1)
    video, audio = torch.randn(latent.size, generator=draw), torch.randn(1, 250, shapes.AUDIO_CHANNELS, generator=draw)
    return Latents(video=video, audio=audio, stage="preview", fps=12.5, seed=1, width=32, height=32, prompt="a red circle")


def copy_without(source: Path, target: Path, part: str, file: str | None) -> Path:
    """A checkpoint of links to `source` in which one folder, or one file of it, is absent."""
    target.mkdir()
    for entry in source.iterdir():
        if entry.name != part:
            (target / entry.name).symlink_to(entry)
        elif file is not None:
            (target / part).mkdir()
            for item in entry.iterdir():
                if item.name != file:
                    (target / part / item.name).symlink_to(item)
    return target


def listing(folder: Path) -> list[str]:
    """Every file below `folder`."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(("arguments", "code", "message"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_generate_bad_input(
    arguments: list[str],
    code: int,
    message: str,
    places: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MAGI2_MODELS", raising=False)

    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(fleet, "open_pipeline", load)
    assert cli.main(["generate", *(argument.format(**places) for argument in arguments)]) == code
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]
    assert "Traceback" not in captured.err and captured.out == ""
    assert listing(tmp_path) == []


def test_generate_latents_of_another_checkpoint_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise Interrupted("far enough")

    monkeypatch.setattr(fleet, "open_pipeline", stop)
    path = tmp_path / "latents.safetensors"
    for made_by, is_named in (("0" * 16, True), (checkpoint_hash(EMBEDDED), False), ("", False)):
        save_latents(replace(small_latents(), checkpoint_hash=made_by), path)
        assert cli.main(["generate", "--from-latents", str(path), "--output", str(tmp_path / "clip.mp4")]) == 130
        assert ("another checkpoint than nano" in capsys.readouterr().err) is is_named


def test_generate_resume_with_another_checkpoint_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "open_pipeline", lambda *_, **__: pytest.fail("something was loaded"))
    latents, path = small_latents(), tmp_path / "cut.safetensors"
    both = {"video": latents.video, "audio": latents.audio}
    history = {name: (value,) for name, value in both.items()}
    solver = SolverState(step=1, num_inference_steps=4, shift=7.0, sample=both, history=history, previous=both, order=1)
    save_latents(replace(latents, solver=solver, checkpoint_hash="0" * 16, prompt="a red circle"), path)
    assert cli.main(["generate", "--resume", str(path), "--output", str(tmp_path / "clip.mp4")]) == 2
    assert "made with another checkpoint than nano. Name it: --checkpoint" in capsys.readouterr().err


def test_generate_chosen_names_do_not_meet(tmp_path: Path, places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs at a time, and a run after a stopped one, choose different names."""
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []

    def look(plan: Any, *_: object) -> None:
        seen.append(plan.files.video.name)
        if len(seen) == 1:
            assert cli.main(["generate", "--from-latents", places["latents"]]) == 130
            plan.files.beside("partial").write_bytes(b"state")
        raise Interrupted("far enough")

    monkeypatch.setattr(fleet, "open_pipeline", look)
    for _ in range(2):
        assert cli.main(["generate", "--from-latents", places["latents"]]) == 130
    assert seen == ["clip_0001.mp4", "clip_0002.mp4", "clip_0002.mp4"]
    assert listing(tmp_path) == ["output/clip_0001.partial.safetensors"]


def test_generate_stopped_while_the_clip_is_written(
    places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mux.write_video

    def write_and_stop(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments, **options)

    monkeypatch.setattr(mux, "write_video", write_and_stop)
    assert cli.main(["generate", "--from-latents", places["latents"], "--device", "cpu", "--output", str(tmp_path / "clip.mp4")]) == 130
    assert f"go on with: generate --from-latents {places['latents']}" in capsys.readouterr().err
    assert listing(tmp_path) == []


def test_generate_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--prompt", "", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_generate_little_free_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = __import__("shutil").disk_usage(tmp_path)
    monkeypatch.setattr("magi2_core.commands.plan.shutil.disk_usage", lambda path: usage._replace(free=5_000_000))
    assert cli.main(["generate", *PROMPT, "--size", "1080p", "--output", str(tmp_path / "clip.mp4")]) == 5
    assert "5 MB free, this clip may take" in capsys.readouterr().err
    assert listing(tmp_path) == []


class FileSizeLimit:
    """Within it no file of this process may grow past `limit` bytes: a write fails as on a full disk."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.before[1]))

    def __exit__(self, *exception: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def test_generate_disk_full_while_writing_the_clip(places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "clip.mp4"
    with FileSizeLimit(20_000):
        code = cli.main(["generate", "--from-latents", places["latents"], "--device", "cpu", "--output", str(output)])
    message = capsys.readouterr().err
    assert code == 5
    assert f"{output} could not be written" in message and f"--from-latents {places['latents']}" in message
    assert listing(tmp_path) == []


def test_generate_disk_full_keeps_the_older_clip(places: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "clip.mp4"
    output.write_bytes(b"older")
    with FileSizeLimit(20_000):
        assert cli.main(["generate", "--from-latents", places["latents"], "--device", "cpu", "--output", str(output)]) == 5
    assert output.read_bytes() == b"older" and listing(tmp_path) == ["clip.mp4"]


def test_generate_disk_full_while_writing_the_sound(places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--output", str(tmp_path / "clip.mp4"), "--wav", str(tmp_path / "clip.wav")]
    with FileSizeLimit(1_000_000):
        assert cli.main(["generate", "--from-latents", places["latents"], "--device", "cpu", *arguments]) == 5
    assert "clip.wav could not be written" in capsys.readouterr().err
    assert "clip.wav" not in listing(tmp_path)


def test_generate_disk_full_while_saving_latents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileSizeLimit(20_000):
        arguments = [*PROMPT, "--size", "32x32", "--steps", "1", "--device", "cpu", "--output", str(tmp_path / "clip.mp4")]
        assert cli.main(["generate", *arguments]) == 5
    assert ".latents.safetensors could not be written" in capsys.readouterr().err
    assert listing(tmp_path) == []
