"""Rotary table and time code."""

import math

import pytest
import torch

from magi2_core.model.rope import RotaryTable, default_bands, rope_table
from magi2_core.model.time_code import time_code, timestep_code


def test_rope_table_text_does_not_rotate_and_a_single_token_does() -> None:
    coords = torch.tensor([[-5.0, 0, 0, 5, 1, 1, 1, 1, 1], [-1.0, 0, 0, 1, 1, 1, 1, 1, 1]])
    table = rope_table(coords, default_bands(4))
    assert torch.equal(table[0], torch.cat([torch.zeros(12), torch.ones(12)]))
    torch.testing.assert_close(table[1, :4], torch.sin(-default_bands(4)))


def test_rope_table_audio_spans_the_video_frames() -> None:
    coords = torch.tensor([[249.0, 0, 0, 250, 1, 1, 32, 1, 1], [31.0, 0, 0, 32, 1, 1, 32, 1, 1]])
    table = rope_table(coords, default_bands(16))
    torch.testing.assert_close(table[0], table[1], atol=3e-6, rtol=0)


def test_rope_table_centres_space_and_not_time() -> None:
    coords = torch.tensor([[0.0, 0, 3, 4, 4, 4, 4, 4, 4]])
    sines = rope_table(coords, torch.tensor([1.0]))[0, :3]
    torch.testing.assert_close(sines, torch.tensor([0.0, math.sin(-1.5), math.sin(1.5)]))


def test_rope_table_undefined_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="not defined"):
        rope_table(torch.tensor([[0.0, 0, 0, 1, 1, 1, 2, 1, 1]]), default_bands(2))


def test_rotary_table_uses_the_loaded_bands() -> None:
    module = RotaryTable(2)
    coords = torch.tensor([[3.0, 0, 0, 4, 1, 1, 4, 1, 1]])
    before = module(coords)
    module.load_state_dict({"bands": torch.tensor([0.5, 0.25])})
    assert not torch.equal(module(coords), before)
    torch.testing.assert_close(module(coords)[0, :2], torch.sin(torch.tensor([1.5, 0.75])))


def test_time_code_cosines_first() -> None:
    code = timestep_code(0, 64)
    assert code[:32].tolist() == [1.0] * 32 and code[32:].tolist() == [0.0] * 32
    code = timestep_code(640, 64).double()
    for k in (0, 7, 31):
        phase = 640 * math.exp(-math.log(10000.0) * k / 32)
        assert abs(float(code[k]) - math.cos(phase)) < 2e-4 and abs(float(code[32 + k]) - math.sin(phase)) < 2e-4


def test_time_code_keeps_the_fp32_round_trip() -> None:
    # t / 1000 * 1000 in fp32 is not t for these (spec preview.md 3.3); the code must be that of the rounded phase.
    for timestep in (127, 253, 511):
        tau = torch.tensor(float(timestep)) / 1000
        phase = tau * 1000
        assert float(phase) != timestep
        assert torch.equal(timestep_code(timestep, 64)[:1], phase.cos().view(1))
        assert torch.equal(timestep_code(timestep, 64), time_code(tau, 64))
