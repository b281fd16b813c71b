"""Segments, coordinates and the way between latents and tokens."""

import pytest
import torch

from magi2_core.config import RefinerConfig, WindowConfig
from magi2_core.errors import RequestError
from magi2_core.model.refiner_packing import (
    RefinerPacking,
    SegmentLengths,
    coordinates,
    pack,
    token_grid,
    unpack_audio,
    unpack_video,
    video_tokens,
)
from magi2_core.model.rope import default_bands, rope_table

WINDOW = WindowConfig(block_t_size=2, block_size=2, block_t_radius=1, block_h_radius=1, block_w_radius=1)
CONFIG = RefinerConfig(
    num_layers=1,
    hidden_size=32,
    head_dim=16,
    num_query_groups=1,
    video_in_channels=6,
    audio_in_channels=4,
    text_in_channels=8,
    window=WINDOW,
)


def _angles(lengths: SegmentLengths, config: RefinerConfig = CONFIG) -> torch.Tensor:
    """Sines of the lowest band: zero where a token is not rotated along (t, y, x)."""
    return rope_table(coordinates(lengths, config), default_bands(2))[:, [0, 2, 4]]


def test_coordinates_text_is_not_rotated_unless_alone() -> None:
    assert not _angles(SegmentLengths(grid=(1, 1, 1), text=5))[1:].any()
    alone = _angles(SegmentLengths(grid=(1, 1, 1), text=1))[1]
    assert alone[0].item() == pytest.approx(torch.sin(torch.tensor(-1.0)).item())


def test_coordinates_video_is_centred_in_space_only() -> None:
    coords = coordinates(SegmentLengths(grid=(3, 4, 5)), CONFIG)
    angles = torch.asin(_angles(SegmentLengths(grid=(2, 3, 3))))
    assert coords[-1].tolist() == [2, 3, 4, 3, 4, 5, 3, 4, 5]
    torch.testing.assert_close(angles[0], torch.tensor([0.0, -1.0, -1.0]))
    torch.testing.assert_close(angles[-1], torch.tensor([1.0, 1.0, 1.0]))


def test_coordinates_interpolated_space() -> None:
    config = RefinerConfig(spatial_rope_interpolation="inter")
    assert coordinates(SegmentLengths(grid=(3, 4, 5)), config)[0].tolist() == [0, 0, 0, 3, 4, 5, 3, 32, 32]


@pytest.mark.parametrize("count, t_patch, reference", [(1, 1, 1), (3, 1, 2), (9, 1, 2), (17, 1, 3), (17, 2, 2)])
def test_coordinates_reference_audio(count: int, t_patch: int, reference: int) -> None:
    config = RefinerConfig(t_patch_size=t_patch)
    rows = coordinates(SegmentLengths(grid=(1, 1, 1), audio=10, ref_audio=count), config)[-count:]
    assert rows[0].tolist() == [20, 0, 0, count, 1, 1, reference, 1, 1]
    assert rows[-1, 0] == 20 + count - 1


def test_coordinates_reference_video_fills_a_square() -> None:
    rows = coordinates(SegmentLengths(grid=(1, 1, 1), ref_video=7), CONFIG)[1:]
    assert rows[:, :3].tolist() == [[1000, i // 3, i % 3] for i in range(7)]
    assert rows[0, 3:].tolist() == [1, 3, 3, 1, 3, 3]


def test_coordinates_unknown_interpolation() -> None:
    with pytest.raises(RequestError, match="'extra' or 'inter'"):
        coordinates(SegmentLengths(grid=(1, 1, 1)), RefinerConfig(spatial_rope_interpolation="none"))


def test_pack_and_unpack_are_inverse() -> None:
    video, audio = torch.randn(1, 6, 3, 5, 4), torch.randn(1, 7, 4)
    lengths = SegmentLengths(grid=(3, 5, 4), audio=7, text=3)
    packing = RefinerPacking.build(lengths, CONFIG)
    sequence = pack(packing, video, CONFIG, {"audio": audio, "text": torch.randn(1, 3, 8)})
    rows = torch.cat([torch.nn.functional.pad(piece[:, :6], (0, 6 - min(6, piece.shape[1]))) for _, piece in sequence.features])
    assert torch.equal(unpack_video(rows, packing, CONFIG), video)
    assert torch.equal(unpack_audio(rows, packing, CONFIG), audio)
    assert not torch.equal(rows[:60], video_tokens(video, CONFIG))


def test_video_tokens_patch_columns_are_channel_major() -> None:
    config = RefinerConfig(patch_size=2)
    latent = torch.arange(2 * 4, dtype=torch.float32).view(1, 2, 1, 2, 2)
    assert video_tokens(latent, config).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_unpack_video_patch_columns_are_channel_minor() -> None:
    config = RefinerConfig(patch_size=2, video_in_channels=8, window=WINDOW)
    packing = RefinerPacking.build(SegmentLengths(grid=(1, 1, 1)), config)
    restored = unpack_video(torch.arange(8, dtype=torch.float32)[None], packing, config)
    assert restored[0, :, 0].tolist() == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_token_grid_patch_does_not_divide() -> None:
    with pytest.raises(RequestError, match="not divisible"):
        token_grid((3, 5, 4), RefinerConfig(patch_size=2))


def test_pack_other_text_length() -> None:
    packing = RefinerPacking.build(SegmentLengths(grid=(1, 2, 2), text=3), CONFIG)
    with pytest.raises(RequestError, match="text has 4 tokens"):
        pack(packing, torch.zeros(1, 6, 1, 2, 2), CONFIG, {"text": torch.zeros(1, 4, 8)})


def test_slice_parts_make_the_whole() -> None:
    lengths = SegmentLengths(grid=(3, 5, 4), audio=7, text=3)
    packing = RefinerPacking.build(lengths, CONFIG)
    whole = pack(packing, torch.randn(1, 6, 3, 5, 4), CONFIG, {"audio": torch.randn(1, 7, 4), "text": torch.randn(1, 3, 8)})
    parts = [whole.slice(start, stop) for start, stop in ((0, 20), (20, 63), (63, 70))]
    assert torch.equal(torch.cat([part.coords for part in parts]), whole.coords)
    assert torch.equal(torch.cat([part.segments.ids for part in parts]), whole.segments.ids)
    for index, (_, piece) in enumerate(whole.features):
        assert torch.equal(torch.cat([part.features[index][1] for part in parts]), piece)
    assert [(part.start, part.stop) for part in parts] == [(0, 20), (20, 63), (63, 70)]
    inner = parts[1].slice(10, 30)
    assert (inner.start, inner.stop) == (30, 50)
    assert torch.equal(inner.coords, whole.coords[30:50])
