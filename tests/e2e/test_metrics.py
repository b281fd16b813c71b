"""The measurements hold on ground truth that went through an mp4, and do not say yes to everything."""

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest
import torch

from magi2_core.media import mux

HERE = Path(__file__).resolve().parent


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"magi2_e2e_{name}", HERE / f"{name}.py")
    sys.modules.setdefault(spec.name, module := importlib.util.module_from_spec(spec))
    if sys.modules[spec.name] is module:
        spec.loader.exec_module(module)
    return sys.modules[spec.name]


metrics = load("metrics")
world = metrics.world


def test_values_equal_grammar(nano_folder: Path) -> None:
    words = json.loads((nano_folder / "generation.json").read_text())["grammar"]
    plural = {"shape": "shapes", "color": "colors", "background": "backgrounds", "motion": "motions", "sound": "sounds", "pitch": "pitches"}
    assert {name: list(values) for name, values in world.VALUES.items()} == {name: list(words[key]) for name, key in plural.items()}


def test_expected_from_prompt_inverts_sample_prompt() -> None:
    rng = random.Random(1)
    for _ in range(500):
        prompt, attributes = metrics.sample_prompt(rng)
        assert metrics.expected_from_prompt(prompt) == attributes, prompt


def test_expected_from_prompt_other_text() -> None:
    with pytest.raises(ValueError, match="grammar"):
        metrics.expected_from_prompt("a red cat moves to the right over a blue background, low hum")


def test_sample_prompt_held_out_share() -> None:
    rng = random.Random(2)
    share = sum(world.held_out(metrics.sample_prompt(rng)[1]) for _ in range(2000)) / 2000
    assert 0.07 < share < 0.14
    assert all(world.held_out(metrics.sample_prompt(rng, seen=False)[1]) for _ in range(20))
    assert not any(world.held_out(metrics.sample_prompt(rng, seen=True)[1]) for _ in range(20))


def every_value(rng: random.Random, count: int) -> list[dict[str, str]]:
    """`count` attribute sets in which each value appears about equally often."""
    columns = {name: [values[i % len(values)] for i in range(count)] for name, values in world.VALUES.items()}
    for column in columns.values():
        rng.shuffle(column)
    return [{name: columns[name][i] for name in columns} for i in range(count)]


def test_measure_clip_of_decoded_mp4(tmp_path: Path) -> None:
    for seed, attributes in enumerate(every_value(random.Random(3), 18)):
        frames, waveform = world.make_clip(attributes, seed)
        mux.write_video(tmp_path / "clip.mp4", frames, world.FPS, waveform=waveform)
        clip = mux.read_video(tmp_path / "clip.mp4")
        assert clip.frames.shape == (125, 64, 112, 3) and clip.waveform.shape == (2, 441000) and clip.sample_rate == 44100
        assert metrics.measure_clip(clip.frames, clip.waveform, clip.sample_rate) == attributes


@pytest.mark.parametrize("sample_rate", [51200, 22050])
def test_measure_clip_other_rate_and_size(sample_rate: int) -> None:
    attributes = {"shape": "triangle", "color": "purple", "background": "gray", "motion": "bounce", "sound": "wind", "pitch": "middle"}
    frames, waveform = world.make_clip(attributes, 5, sample_rate)
    frames = frames.repeat_interleave(2, 1).repeat_interleave(2, 2)
    assert metrics.measure_clip(frames, waveform, sample_rate) == attributes


def test_measure_clip_empty_and_silent() -> None:
    frames = torch.full((125, 64, 112, 3), 120, dtype=torch.uint8)
    measured = metrics.measure_clip(frames, torch.zeros(2, 441000), 44100)
    assert measured == {"shape": None, "color": None, "background": "gray", "motion": None, "sound": None, "pitch": None}
