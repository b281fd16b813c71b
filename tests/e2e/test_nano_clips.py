"""The embedded checkpoint makes the clip that its prompt asks for: made by the command line, measured in the written mp4.

Three clips in CI; 24 at the checkpoint's own 25 steps under the marker `slow`, at least 95 % of their attributes right.
"""

import importlib.util
import random
import sys
from pathlib import Path

import pytest
from PIL import Image
from torch import Tensor

from magi2_core import cli
from magi2_core.media.image import load_image
from magi2_core.media.reading import read_video
from magi2_core.request import load_latents

HERE = Path(__file__).resolve().parent


def _load_metrics():
    spec = importlib.util.spec_from_file_location("magi2_e2e_metrics", HERE / "metrics.py")
    if spec.name not in sys.modules:
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    return sys.modules[spec.name]


metrics = _load_metrics()


def make_clip(prompt: str, output: Path, *arguments: str) -> dict[str, str | None]:
    """Runs `generate` and measures the written file."""
    assert cli.main(["generate", "--prompt", prompt, "--device", "cpu", "--output", str(output), *arguments]) == 0
    clip = read_video(output)
    assert clip.frames.shape == (125, 64, 112, 3) and clip.waveform.shape == (2, 441000)
    return metrics.measure_clip(clip.frames, clip.waveform, clip.sample_rate)


def save_first_frame(attributes: dict[str, str], seed: int, path: Path) -> Path:
    """A picture of the world as the first frame of an I2VA clip."""
    frames, _ = metrics.world.make_clip(attributes, seed)
    Image.fromarray(frames[0].numpy()).save(path)
    return path


def centre(frame: Tensor) -> tuple[float, float]:
    """x and y in pixels of what differs from the frame's corner, in one frame [H, W, 3] of values in [0, 1]."""
    rows, columns = ((frame - frame[0, 0]).abs().amax(-1) > metrics.SEEN_DIFFERENCE).nonzero(as_tuple=True)
    return float(columns.float().mean()), float(rows.float().mean())


CI_CLIPS = [
    ("a red circle moves to the right over a blue background, low hum", 1),
    ("yellow triangle, black background, moves up, high beeps", 2),
]


@pytest.mark.parametrize(("prompt", "seed"), CI_CLIPS, ids=["circle", "triangle"])
def test_nano_t2va_shows_what_the_prompt_says(prompt: str, seed: int, tmp_path: Path) -> None:
    measured = make_clip(prompt, tmp_path / "clip.mp4", "--steps", "12", "--seed", str(seed))
    assert measured == metrics.expected_from_prompt(prompt)


def test_nano_i2va_starts_from_the_picture(nano_folder: Path, tmp_path: Path) -> None:
    prompt = "a green square moves to the left over a gray background, middle wind"
    picture = nano_folder.parent / "green_square.png"
    output = tmp_path / "clip.mp4"
    assert make_clip(prompt, output, "--image", str(picture), "--steps", "12") == metrics.expected_from_prompt(prompt)
    first = read_video(output).frames[0].float() / 255
    wanted = load_image(picture).float() / 255
    assert centre(first) == pytest.approx(centre(wanted), abs=4.0)
    assert (first - wanted).abs().mean() < 0.05


def test_nano_same_seed_same_file(tmp_path: Path) -> None:
    hashes, files = [], []
    for name, seed in (("one", "5"), ("two", "5"), ("three", "6")):
        output = tmp_path / f"{name}.mp4"
        arguments = ["--device", "cpu", "--size", "64x32", "--steps", "2", "--seed", seed, "--output", str(output)]
        assert cli.main(["generate", "--prompt", CI_CLIPS[0][0], *arguments]) == 0
        hashes.append(load_latents(tmp_path / f"{name}.latents.safetensors").sha256())
        files.append(output.read_bytes())
    assert hashes[0] == hashes[1] != hashes[2]
    assert files[0] == files[1] != files[2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nano_24_clips_at_25_steps(tmp_path: Path) -> None:
    rng = random.Random(24)
    right, wrong = 0, []
    for number in range(24):
        prompt, attributes = metrics.sample_prompt(rng, seen=number % 4 != 0)
        picture: tuple[str, ...] = ()
        if number % 2:
            picture = ("--image", str(save_first_frame(attributes, number, tmp_path / f"{number}.png")))
        measured = make_clip(prompt, tmp_path / f"{number}.mp4", "--seed", str(1000 + number), *picture)
        right += sum(measured[name] == value for name, value in attributes.items())
        wrong += [f"{prompt} (seed {1000 + number}{', picture' if picture else ''}): {measured}"] if measured != attributes else []
    total = 24 * len(attributes)
    sys.stdout.write(f"{right} of {total} attributes, {24 - len(wrong)} of 24 clips right\n" + "\n".join(wrong) + "\n")
    assert right >= 0.95 * total, "\n".join(wrong)
