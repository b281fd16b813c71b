"""The velocity model of the refiner: which branches run, and what they are given."""

import pytest
import torch

from magi2_core.config import RefinerConfig, WindowConfig
from magi2_core.errors import RequestError
from magi2_core.model.modality import AUDIO, TEXT, VIDEO
from magi2_core.model.refiner_velocity import RefinerVelocity
from magi2_core.shapes import LatentShape

SHAPE = LatentShape(channels=6, frames=3, height=3, width=5)
TEXT_FEATURES, NEGATIVE = torch.ones(1, 4, 12, dtype=torch.bfloat16), torch.full((1, 2, 12), 2.0, dtype=torch.bfloat16)


class Model:
    """Answers with the row's own features, so that what went in can be read off what comes out."""

    def __init__(self) -> None:
        self.config = RefinerConfig(
            video_in_channels=6,
            audio_in_channels=8,
            text_in_channels=12,
            window=WindowConfig(block_t_size=2, block_size=2),
        )
        self.calls: list = []

    def __call__(self, sequence):
        self.calls.append(sequence)
        rows = torch.zeros(sequence.stop, 8)
        at = 0
        for _, piece in sequence.features:
            rows[at : at + len(piece), : piece.shape[1]] = piece[:, :8]
            at += len(piece)
        return rows


def test_refiner_velocity_two_branches_cond_first() -> None:
    model, video = Model(), torch.randn(SHAPE.size)
    velocities = RefinerVelocity(model, latent_shape=SHAPE, text=TEXT_FEATURES, negative=NEGATIVE)(video, None, 999)
    assert [[(m, len(piece)) for m, piece in call.features] for call in model.calls] == [[(VIDEO, 45), (TEXT, 4)], [(VIDEO, 45), (TEXT, 2)]]
    assert model.calls[0].features[1][1].dtype == torch.float32
    assert [float(call.features[1][1].max()) for call in model.calls] == [1.0, 2.0]
    assert torch.equal(velocities.video_cond, video)
    assert torch.equal(velocities.video_uncond, video)
    assert velocities.audio_cond is None
    assert velocities.audio_uncond is None


def test_refiner_velocity_unguided_runs_the_negative_prompt_only() -> None:
    model = Model()
    velocity = RefinerVelocity(model, latent_shape=SHAPE, text=TEXT_FEATURES, negative=NEGATIVE, guided=False)
    velocities = velocity(torch.randn(SHAPE.size), None, 999)
    assert velocities.video_cond is None
    assert [len(call.features[1][1]) for call in model.calls] == [2]


def test_refiner_velocity_moving_audio_comes_back() -> None:
    audio = torch.randn(1, 5, 8)
    velocity = RefinerVelocity(Model(), latent_shape=SHAPE, text=TEXT_FEATURES, negative=NEGATIVE, audio_tokens=5)
    velocities = velocity(torch.randn(SHAPE.size), audio, 999)
    assert torch.equal(velocities.audio_cond, audio)
    assert torch.equal(velocities.audio_uncond, audio)


def test_refiner_velocity_fixed_audio_is_context() -> None:
    model, audio = Model(), torch.randn(1, 5, 8)
    velocity = RefinerVelocity(model, latent_shape=SHAPE, text=TEXT_FEATURES, negative=NEGATIVE, fixed_audio=audio)
    assert velocity(torch.randn(SHAPE.size), None, 999).audio_uncond is None
    assert [m for m, _ in model.calls[0].features] == [VIDEO, AUDIO, TEXT]
    assert torch.equal(model.calls[1].features[1][1], audio[0])


def test_refiner_velocity_wrong_text_width() -> None:
    with pytest.raises(RequestError, match=r"expected \(1, length, 12\)"):
        RefinerVelocity(Model(), latent_shape=SHAPE, text=torch.ones(1, 4, 11), negative=NEGATIVE)
