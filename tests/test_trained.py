"""What a checkpoint says it was trained for, and the line about a request beyond it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from magi2_core import cli
from magi2_core.checkpoint.tiny import generation_values
from magi2_core.config import GenerationDefaults
from magi2_core.errors import CheckpointError
from magi2_core.request import Conditioning, EncodeRequest, Latents, RefineRequest, SampleRequest
from magi2_core.trained import describe_untrained

EMPTY = torch.zeros(1, 0, 1)
CONDITIONING = Conditioning(text=EMPTY, negative=EMPTY)
LATENTS = Latents(video=EMPTY, audio=EMPTY, stage="preview", fps=12.5, seed=0, width=112, height=64)
REFINE = RefineRequest(conditioning=CONDITIONING, latents=LATENTS, width=240, height=128)


def sample(**changes: Any) -> SampleRequest:
    return SampleRequest(**{"conditioning": CONDITIONING, "width": 112, "height": 64, **changes})


@pytest.fixture
def nano(nano_folder: Path) -> GenerationDefaults:
    return GenerationDefaults.from_folder(nano_folder)


def test_describe_untrained_own_ground_says_nothing(nano: GenerationDefaults, nano_folder: Path) -> None:
    grammar = json.loads((nano_folder / "generation.json").read_text())["grammar"]
    for prompt in (nano.default_prompt, *grammar["example_prompts"]):
        assert describe_untrained("nano", nano, EncodeRequest(prompt=prompt), sample()) == ""


def test_describe_untrained_names_everything_beyond(nano: GenerationDefaults) -> None:
    prompt = EncodeRequest(prompt="A red dragon flies, and roars over the old burning castle")
    text = describe_untrained("nano", nano, prompt, sample(width=448, height=256, seconds=4.0), REFINE)
    for words in (
        '"dragon", "flies", "roars", "old" ...',
        "448x256 pixels (but for 112x64)",
        "4 seconds (but for 10)",
        "refiner's weights",
    ):
        assert words in text
    assert text.startswith("nano was not trained for") and "\n" not in text and "castle" not in text


def test_describe_untrained_released_checkpoint_knows_everything(tmp_path: Path) -> None:
    defaults = GenerationDefaults.from_folder(tmp_path)
    assert describe_untrained("it", defaults, EncodeRequest(prompt="a dragon"), sample(width=448, seconds=4.0), REFINE) == ""


def test_describe_untrained_tiny_is_random(tmp_path: Path) -> None:
    (tmp_path / "generation.json").write_text(json.dumps(generation_values(0)))
    text = describe_untrained("tiny", GenerationDefaults.from_folder(tmp_path), EncodeRequest(prompt="a dragon"), sample())
    assert text.startswith("tiny was not trained for sampling (its weights are random)")


def test_nano_words_are_those_of_its_grammar(nano: GenerationDefaults, nano_folder: Path) -> None:
    grammar = json.loads((nano_folder / "generation.json").read_text())["grammar"]
    text = re.sub(r"\{\w\}", " ", json.dumps([grammar, list(grammar["motions"]), list(grammar["sounds"])]).lower())
    keys = {*grammar, *grammar["motions"], *grammar["sounds"]}
    said = set(re.findall(r"[a-z]+(?:-[a-z]+)*", text)) - {word for key in keys for word in key.split("_")}
    assert said <= set(nano.trained.words)


@pytest.mark.parametrize("trained", [{"sizes": [112]}, {"seconds": ["ten"]}, {"words": "red"}, ["sizes"]])
def test_trained_for_damaged(tmp_path: Path, trained: Any) -> None:
    (tmp_path / "generation.json").write_text(json.dumps({"trained": trained}))
    with pytest.raises(CheckpointError, match=r"trained|words"):
        GenerationDefaults.from_folder(tmp_path)


def test_generate_says_what_the_nano_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", "--steps", "2", "--stop-after", "1", "--device", "cpu", "--output", str(tmp_path / "clip.mp4")]
    assert cli.main([*line, "--size", "32x32", "--prompt", "a red dragon"]) == 0
    assert 'nano was not trained for "dragon"' in capsys.readouterr().err
    assert cli.main([*line, "--prompt", "a red circle moves up over a blue background, low hum"]) == 0
    assert "not trained" not in capsys.readouterr().err
