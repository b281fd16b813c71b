"""Resizing and conversions; chunking must not change a bit."""

import pytest
import torch

from magi2_core.errors import RequestError
from magi2_core.media import frames


def clip(count: int, height: int = 6, width: int = 8) -> torch.Tensor:
    return torch.randint(0, 256, (count, height, width, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_resize_frames_chunks_equal_whole(monkeypatch) -> None:
    whole = frames.resize_frames(clip(7), 11, 5)
    monkeypatch.setattr(frames, "CHUNK_PIXELS", 2 * 11 * 6)
    assert torch.equal(frames.resize_frames(clip(7), 11, 5), whole)


def test_resize_frames_truncates() -> None:
    row = torch.tensor([0, 3], dtype=torch.uint8).view(1, 1, 2, 1).expand(1, 1, 2, 3)
    assert frames.resize_frames(row, 4, 1)[0, 0, :, 0].tolist() == [0, 0, 2, 3]  # 0, 0.75, 2.25, 3


def test_to_uint8_inverts_to_float(monkeypatch) -> None:
    monkeypatch.setattr(frames, "CHUNK_PIXELS", 256)
    every = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(3, 16, 16, 3)
    images = frames.to_float(every)
    assert images.dtype == torch.float32 and images.min() == 0 and images.max() == 1
    assert torch.equal(frames.to_uint8(images), every)


def test_to_uint8_clips_nan_alpha_and_grey() -> None:
    values = torch.tensor([-1.0, 2.0, float("nan"), 0.25]).view(1, 2, 2, 1)
    assert frames.to_uint8(values)[0, :, :, 2].flatten().tolist() == [0, 255, 0, 64]
    assert frames.to_uint8(torch.ones(1, 2, 2, 4, dtype=torch.float16)).shape == (1, 2, 2, 3)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(2, 4, 4, 3), torch.zeros(4, 4, 3, dtype=torch.uint8), torch.zeros(0, 4, 4, 3, dtype=torch.uint8)]
)
def test_check_frames_refuses(wrong) -> None:
    with pytest.raises(RequestError, match="uint8"):
        frames.resize_frames(wrong, 4, 4)


def test_resize_frames_and_to_uint8_refuse() -> None:
    with pytest.raises(RequestError, match="at least 1"):
        frames.resize_frames(clip(1), 0, 4)
    with pytest.raises(RequestError, match="float"):
        frames.to_uint8(clip(1))
