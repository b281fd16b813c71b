"""Compact captions and the figure line."""

import json
from pathlib import Path

import pytest

from magi2_core.text.caption import add_figure_line, figure_marker, normalize_prompt

FIXTURES = Path(__file__).parent / "fixtures"
NORMALIZE = json.loads((FIXTURES / "text_encoder_normalize.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NORMALIZE)
def test_normalize_prompt_golden(name: str) -> None:
    assert normalize_prompt(NORMALIZE[name]["prompt"]) == NORMALIZE[name]["out"]


def test_normalize_prompt_empty_fields_give_empty_text() -> None:
    assert normalize_prompt('{"global_layer": {"camera": "wide"}}') == ""


def test_normalize_prompt_wrong_types_do_not_raise() -> None:
    caption = {
        "global_layer": {"context": 3, "aesthetics": ["x"], "audio_baseline": "hum", "alive_subjects_static": {"subject_id": "s"}},
        "dynamic_layer": {"timeline_segments": [{"audio": [1], "objects": "o", "alive_subjects": [{"action": "runs"}]}]},
    }
    assert normalize_prompt(json.dumps(caption)) == "context: 3\ntimeline:\n -"


def test_normalize_prompt_only_description() -> None:
    assert normalize_prompt('{"global_layer": {"description": "a  fox"}}') == "context\na fox"


def test_normalize_prompt_is_stable() -> None:
    once = normalize_prompt((FIXTURES / "t2v_full.json").read_text(encoding="utf-8"))
    assert once.startswith("context: A kite") and normalize_prompt(once) == once


@pytest.mark.parametrize("prompt", ["[" * 100_000, "9" * 5000, '{"a": ' * 5000])
def test_normalize_prompt_hostile_json_is_verbatim(prompt: str) -> None:
    assert normalize_prompt(prompt) == prompt
    assert add_figure_line(prompt) == prompt + "reference_layer:The first frame refers to <Figure 1>"


def test_add_figure_line_plain_text_is_glued() -> None:
    assert add_figure_line("a fox.") == "a fox.reference_layer:The first frame refers to <Figure 1>"


def test_add_figure_line_json_object_overwrites() -> None:
    prompt = '{"reference_layer": ["old", "older"], "global_layer": {"context": "狐"}}'
    line = add_figure_line(prompt)
    assert "狐" in line
    assert json.loads(line)["reference_layer"] == ["The first frame refers to <Figure 1>"]
    assert normalize_prompt(line) == "context: 狐\nThe first frame refers to <Figure 1>"


@pytest.mark.parametrize("prompt", ["[1]", '"text"', "3", "null"])
def test_add_figure_line_other_json_is_text(prompt: str) -> None:
    assert add_figure_line(prompt).startswith(prompt + "reference_layer:")


def test_figure_marker_is_in_the_line() -> None:
    assert figure_marker(1) in add_figure_line("x") and figure_marker(12) == "<Figure 12>"
